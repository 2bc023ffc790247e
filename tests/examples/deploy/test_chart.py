"""Tests of the Helm chart: what it renders is valid, and says what its values promise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from latimer.adapter.settings import FlatSettings

pytestmark = pytest.mark.slow

helm = pytest.importorskip("helm_python", reason="make test-deploy installs Helm")
kubernetes = pytest.importorskip("kubernetes_validate", reason="make test-deploy installs it")

DEPLOY = Path(__file__).parents[3] / "examples" / "deploy"
CHART = DEPLOY / "chart"
# The first that the chart is for, and a later one.
VERSIONS = ("1.30", "1.34")
# Resources of other projects, for which no package has a schema.
FOREIGN = {"ScaledObject", "ServiceMonitor", "InferencePool", "HTTPRoute"}
CONFIG = '[engines.one]\nurl = "http://one:8080"\n[engines.two]\nurl = "http://two:8080"\n'
EVERYTHING: dict[str, Any] = {
    "config": CONFIG,
    "secretEnv": "latimer-env",
    "store": "secret",
    "engine": {"enabled": True},
    "metrics": {"open": True, "serviceMonitor": {"enabled": True, "labels": {"release": "p"}}},
    "autoscaling": {"enabled": True},
    "inferencePool": {"enabled": True},
    "networkPolicy": {"egress": [{"to": [{"namespaceSelector": {}}]}]},
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"operator": "Exists"}],
}
VALUES: dict[str, dict[str, Any]] = {
    "proxy": {},
    "fleet": {"config": CONFIG},
    "engine": {"engine": {"enabled": True, "resources": {"limits": {"nvidia.com/gpu": "1"}}}},
    "store": {"store": "secret", "secretEnv": "latimer-env"},
    "one": {"store": "memory", "replicas": 1, "networkPolicy": {"enabled": False}},
    "open": {"keys": {"secret": ""}, "settings": {"KEEPALIVE": 5}},
    "monitored": {"metrics": {"serviceMonitor": {"enabled": True}}},
    "everything": EVERYTHING,
}


def rendered(values: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the resources of the chart by kind and name."""
    files = helm.Chart.load(str(CHART)).render(values, name="latimer", namespace="models")
    found = [one for text in files.values() for one in yaml.safe_load_all(text) if one]
    resources = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(resources) == len(found)
    return resources


def pod(values: dict[str, Any]) -> Any:
    """Return the specification of the pods."""
    return rendered(values)["Deployment", "latimer"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_kubernetes_accepts_the_resources(values: dict[str, Any], version: str) -> None:
    """Every resource of Kubernetes follows the schema of its kind, without unknown fields."""
    for (kind, _), resource in rendered(values).items():
        if kind not in FOREIGN:
            kubernetes.validate(resource, version, strict=True)


def test_a_wrong_field_is_found() -> None:
    """The schemas reject an unknown field, so that the other tests can fail."""
    resource = rendered({})["Deployment", "latimer"]
    resource["spec"]["replica"] = 1
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(resource, VERSIONS[-1], strict=True)


def test_helm_accepts_the_chart() -> None:
    """Helm's own check finds no error."""
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    assert all(one["severity"] < 2 for one in found["messages"]), found["messages"]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_pods_are_restricted(values: dict[str, Any]) -> None:
    """Containers are not root, cannot write to their images, and have no privileges."""
    spec = pod(values)
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["automountServiceAccountToken"] is False
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_a_pod_ends_after_its_drain() -> None:
    """The time to end covers the sleep and the drain, which are the values of the chart."""
    spec = pod({"drain": 100, "preStop": 7})
    latimer = spec["containers"][0]
    assert latimer["lifecycle"]["preStop"] == {"sleep": {"seconds": 7}}
    assert {"name": "LATIMER_DRAIN", "value": "100"} in latimer["env"]
    assert spec["terminationGracePeriodSeconds"] >= 100 + 7 + 10


def test_probes_ask_different_questions() -> None:
    """A pod is removed from the service by /ready; it is restarted only if it does not respond."""
    latimer = pod({})["containers"][0]
    assert latimer["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert latimer["livenessProbe"]["exec"]["command"][-1] == "--alive"


def test_the_engine_starts_first_and_ends_last() -> None:
    """The engine in a pod is a sidecar that only Latimer reaches."""
    spec = pod({"engine": {"enabled": True}})
    engine = spec["initContainers"][0]
    assert engine["restartPolicy"] == "Always"
    assert engine["args"][2:4] == ["--host", "127.0.0.1"]
    env = {one["name"]: one["value"] for one in spec["containers"][0]["env"]}
    assert env["LATIMER_MODEL"] == "http://127.0.0.1:8080"
    assert "initContainers" not in pod({})


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_environment_variables_are_settings(values: dict[str, Any]) -> None:
    """Every variable that the chart sets is a setting of Latimer."""
    names = {one["name"].lower() for one in pod(values)["containers"][0]["env"]}
    assert names <= {f"latimer_{name}" for name in FlatSettings.model_fields}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"store": "memory"}, "memory is for one pod"),
        ({"store": "memory", "replicas": 1, "autoscaling": {"enabled": True}}, "for one pod"),
        ({"store": "secret"}, "needs secretEnv"),
        ({"inferencePool": {"enabled": True}}, "needs metrics.open"),
        (
            {"keys": {"secret": ""}, "metrics": {"serviceMonitor": {"enabled": True}}},
            "a ServiceMonitor needs keys.secret",
        ),
    ],
)
def test_contradictions_are_errors(values: dict[str, Any], says: str) -> None:
    """Values that cannot work together are an error that says why."""
    with pytest.raises(helm.HelmError, match=re.escape(says)):
        rendered(values)


@pytest.mark.parametrize(
    ("values", "model"),
    [
        ({}, "http://llama-server:8080"),
        ({"engineUrl": "", "config": 'model = "http://other:8080"\n'}, None),
        ({"config": CONFIG}, None),
        ({"config": CONFIG, "engine": {"enabled": True}}, None),
        ({"engine": {"enabled": True}}, "http://127.0.0.1:8080"),
    ],
)
def test_one_place_names_the_engine(values: dict[str, Any], model: str | None) -> None:
    """The variable of the engine's address does not override the settings file."""
    env = {one["name"]: one["value"] for one in pod(values)["containers"][0]["env"]}
    assert env.get("LATIMER_MODEL") == model


def test_secrets_are_not_in_the_chart() -> None:
    """The chart refers to secrets by name, and makes none."""
    assert "Secret" not in {kind for kind, _ in rendered(EVERYTHING)}
    volumes = {one["name"]: one for one in pod({})["volumes"]}
    assert volumes["keys"]["secret"]["secretName"] == "latimer-keys"


def test_the_deployment_leaves_its_size_to_the_scaler() -> None:
    """With autoscaling, the deployment has no number of pods that would reset KEDA's."""
    resources = rendered({"autoscaling": {"enabled": True, "min": 2}})
    assert "replicas" not in resources["Deployment", "latimer"]["spec"]
    scaler = resources["ScaledObject", "latimer"]["spec"]
    assert scaler["scaleTargetRef"] == {"name": "latimer"}
    assert scaler["minReplicaCount"] == 2
    queries = [one["metadata"]["query"] for one in scaler["triggers"]]
    assert queries[0] == 'sum(latimer_num_requests_waiting{namespace="models", service="latimer"})'


def test_the_version_is_the_packages() -> None:
    """The chart's image has the version of the project."""
    version = re.search(r'^version = "(.*)"', (DEPLOY.parents[1] / "pyproject.toml").read_text(), 8)
    assert version
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == version[1]
