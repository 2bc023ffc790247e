"""Tests of the Helm chart: what it renders is valid, and says what its values promise."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from latimer.adapter.settings import FlatSettings, Settings

pytestmark = pytest.mark.slow

helm = pytest.importorskip("helm_python", reason="make test-deploy installs Helm")
kubernetes = pytest.importorskip("kubernetes_validate", reason="make test-deploy installs it")

DEPLOY = Path(__file__).parents[3] / "examples" / "deploy"
CHART = DEPLOY / "chart"
# The environment of `make test-ray`.
RAY_PYTHON = DEPLOY.parents[1] / ".venv-ray" / "bin" / "python"
# The first that the chart is for, and a later one.
VERSIONS = ("1.30", "1.34")
# Resources of other projects, for which no package has a schema. The tests check the pods and the
# application in a RayService, and not its other fields.
FOREIGN = {"ScaledObject", "ServiceMonitor", "InferencePool", "HTTPRoute", "RayService"}
TMP = "/tmp"  # noqa: S108
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
RAY: dict[str, Any] = {"enabled": True}
RAY_VALUES: dict[str, dict[str, Any]] = {
    "ray": {"ray": RAY},
    "one replica": {
        "store": "memory",
        "keys": {"secret": ""},
        "networkPolicy": {"enabled": False},
        "ray": {**RAY, "replicas": {"max": 1}, "workers": {"max": 1}, "volume": None},
    },
    "all of ray": {
        "config": 'model_name = ["small"]\n',
        "secretEnv": "latimer-env",
        "store": "secret",
        "settings": {"KEEPALIVE": 5},
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"operator": "Exists"}],
        "ray": {
            **RAY,
            "args": {"model": "hf:ORG/REPO", "context": 8192},
            "replicas": {"min": 2, "max": 6, "running": 4, "most": 16},
            "actor": {"num_gpus": 1, "num_cpus": 0.5},
            "workers": {"min": 2, "max": 6, "resources": {"limits": {"nvidia.com/gpu": "1"}}},
        },
    },
}
# Checks the application with Ray's schema, and its arguments with Latimer's builder.
CHECK = """
import json, sys
from latimer.adapter import ray_serve
from ray import serve
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema
config = ServeDeploySchema.model_validate(json.load(sys.stdin))
for one in config.applications:
    one.args.pop("config", None)
    build = import_attr(one.import_path)
    assert build is ray_serve.app
    assert isinstance(build(one.args), serve.Application)
"""


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


def service(values: dict[str, Any]) -> Any:
    """Return the specification of the RayService."""
    return rendered(values)["RayService", "latimer"]["spec"]


def ray_pods(values: dict[str, Any]) -> tuple[Any, Any]:
    """Return the templates of the pods of the head and of the workers."""
    cluster = service(values)["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    return cluster["headGroupSpec"]["template"], workers["template"]


def application(values: dict[str, Any]) -> Any:
    """Return the configuration of Ray Serve, and check that it has one application."""
    config = yaml.safe_load(service(values)["serveConfigV2"])
    assert len(config["applications"]) == 1
    return config


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", {**VALUES, **RAY_VALUES}.values(), ids=[*VALUES, *RAY_VALUES])
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


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", RAY_VALUES.values(), ids=RAY_VALUES)
def test_kubernetes_accepts_the_pods_of_ray(values: dict[str, Any], version: str) -> None:
    """The templates of Ray's head and workers are pods without unknown fields."""
    for template in ray_pods(values):
        resource = {"apiVersion": "v1", "kind": "Pod", **template}
        resource["metadata"] = {"name": "pod", **template["metadata"]}
        kubernetes.validate(resource, version, strict=True)
        resource["spec"]["containers"][0]["probe"] = {}
        with pytest.raises(kubernetes.ValidationError):
            kubernetes.validate(resource, version, strict=True)


def test_helm_accepts_the_chart() -> None:
    """Helm's own check finds no error."""
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    assert all(one["severity"] < 2 for one in found["messages"]), found["messages"]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_pods_are_restricted(values: dict[str, Any]) -> None:
    """Containers are not root, cannot write to their images, and have no privileges."""
    check_restricted(pod(values))


@pytest.mark.parametrize("values", RAY_VALUES.values(), ids=RAY_VALUES)
def test_pods_of_ray_are_restricted(values: dict[str, Any]) -> None:
    """The same holds for Ray, which writes to /tmp and to shared memory in its own volumes."""
    cluster = service(values)["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    scales = cluster.get("enableInTreeAutoscaling", False)
    if scales:
        assert cluster["autoscalerOptions"]["securityContext"]["readOnlyRootFilesystem"]
    for template, has_token in zip(ray_pods(values), (scales, False), strict=True):
        spec = template["spec"]
        check_restricted(spec, has_token=has_token)
        empty = {one["name"] for one in spec["volumes"] if "emptyDir" in one}
        mounts = spec["containers"][0]["volumeMounts"]
        written = {one["mountPath"] for one in mounts if not one.get("readOnly")}
        assert written == {one["mountPath"] for one in mounts if one["name"] in empty}
        assert written == {TMP, "/dev/shm"}  # noqa: S108


def check_restricted(spec: Any, *, has_token: bool = False) -> None:
    """Check that no container of a pod can do more than it must."""
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["automountServiceAccountToken"] is has_token
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


def test_a_worker_of_ray_ends_after_its_requests() -> None:
    """Ray drains a worker that ends, in the time for new replicas elsewhere and the drain."""
    values = {"drain": 100, "ray": {**RAY, "handover": 30}}
    head, workers = ray_pods(values)
    command = workers["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["bash", "-c"]
    assert command[2].startswith("timeout 15 ray drain-node ")
    assert "--deadline-remaining-seconds 150;" in command[2]
    assert workers["spec"]["terminationGracePeriodSeconds"] == 150 + 30
    # An old cluster has no other node for its replicas.
    assert service(values)["rayClusterDeletionDelaySeconds"] == 100 + 20
    assert "lifecycle" not in head["spec"]["containers"][0]
    (deployment,) = application(values)["applications"][0]["deployments"]
    assert deployment["graceful_shutdown_timeout_s"] == 100 + 20


def test_ray_serves_the_application_of_the_example() -> None:
    """The application, its deployment and its options are those of the example's file."""
    example = yaml.safe_load((DEPLOY / "ray" / "serve.yaml").read_text())
    values = RAY_VALUES["all of ray"]
    config = application(values)
    assert config["proxy_location"] == example["proxy_location"]
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8000}  # noqa: S104
    (one,), other = config["applications"], example["applications"][0]
    assert one["route_prefix"] == "/"
    assert one["import_path"] == other["import_path"]
    (deployment,), (named,) = one["deployments"], other["deployments"]
    assert deployment["name"] == named["name"]
    assert set(named) <= set(deployment)
    assert one["args"] == {**values["ray"]["args"], "config": "/etc/latimer/latimer.toml"}
    assert deployment["ray_actor_options"] == values["ray"]["actor"]
    assert deployment["max_ongoing_requests"] == 16
    scaling = {"min_replicas": 2, "max_replicas": 6, "target_ongoing_requests": 4}
    assert deployment["autoscaling_config"] == scaling


@pytest.mark.parametrize("values", RAY_VALUES.values(), ids=RAY_VALUES)
def test_arguments_of_ray_are_settings(values: dict[str, Any]) -> None:
    """The arguments of the application are settings of Latimer, and so are the variables."""
    args = application(values)["applications"][0]["args"]
    args.pop("config", None)
    assert Settings.load(None, **args).model == args["model"]
    names = {f"latimer_{name}" for name in FlatSettings.model_fields}
    for template in ray_pods(values):
        env = template["spec"]["containers"][0]["env"]
        own = {one["name"].lower() for one in env if not one["name"].startswith("RAY_")}
        assert own <= names


@pytest.mark.parametrize("values", RAY_VALUES.values(), ids=RAY_VALUES)
def test_ray_accepts_the_application(values: dict[str, Any]) -> None:
    """Ray's schema accepts the configuration, and Latimer's builder its arguments."""
    if not RAY_PYTHON.exists():
        pytest.skip("make test-ray installs Ray")
    for change, fails in (({}, False), ({"unknown_setting": 1}, True)):
        config = application(values)
        config["applications"][0]["args"] |= change
        done = subprocess.run(
            [RAY_PYTHON, "-c", CHECK], input=json.dumps(config), capture_output=True, text=True
        )
        assert (done.returncode != 0) == fails, done.stderr


def test_ray_replaces_the_proxy() -> None:
    """With Ray, the chart has no proxy; KubeRay makes the Service, with the proxy's name."""
    resources = rendered({"ray": RAY})
    assert {kind for kind, _ in resources} == {"RayService", "NetworkPolicy"}
    assert service({"ray": RAY})["serveService"]["metadata"] == {"name": "latimer"}


def test_nodes_of_ray_reach_each_other() -> None:
    """Clients reach one port, Ray's nodes all of each other, and KubeRay the dashboard."""
    policy = rendered({"ray": RAY})["NetworkPolicy", "latimer"]["spec"]
    clients, nodes, operator = policy["ingress"]
    assert [one["port"] for one in clients["ports"]] == [8000]
    assert "ports" not in nodes
    assert {one["port"] for one in operator["ports"]} == {8000, 8265}
    labels = policy["podSelector"]["matchLabels"]
    assert nodes["from"] == [{"podSelector": {"matchLabels": labels}}]
    for template in ray_pods({"ray": RAY}):
        assert labels.items() <= template["metadata"]["labels"].items()


def test_the_middleware_of_ray_is_on_every_node() -> None:
    """The proxies of the head and of the workers answer for a replica that ended."""
    for template in ray_pods({"ray": RAY}):
        env = {one["name"]: one["value"] for one in template["spec"]["containers"][0]["env"]}
        place = env["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
        assert place == "latimer.adapter.ray_proxy:middlewares"


def test_the_autoscaler_of_ray_is_there_if_workers_vary() -> None:
    """A fixed number of workers needs no autoscaler, and so no access to Kubernetes."""
    fixed = service({"ray": {**RAY, "workers": {"min": 2, "max": 2}}})["rayClusterConfig"]
    assert "enableInTreeAutoscaling" not in fixed
    varied = service({"ray": {**RAY, "workers": {"min": 1, "max": 3}}})["rayClusterConfig"]
    assert varied["enableInTreeAutoscaling"]
    (group,) = varied["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 3)


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
        ({"ray": RAY, "store": "memory"}, "memory is that of one replica"),
        ({"ray": RAY, "store": "secret"}, "needs secretEnv"),
        ({"ray": RAY, "engine": {"enabled": True}}, "without engine.enabled"),
        ({"ray": RAY, "autoscaling": {"enabled": True}}, "without autoscaling.enabled"),
        (
            {"ray": RAY, "inferencePool": {"enabled": True}, "metrics": {"open": True}},
            "without inferencePool.enabled",
        ),
        (
            {"ray": RAY, "metrics": {"serviceMonitor": {"enabled": True}}},
            "without metrics.serviceMonitor.enabled",
        ),
        ({"ray": {**RAY, "args": {"api_key": ["a"]}}}, "ray.args.api_key"),
        ({"ray": {**RAY, "replicas": {"min": 3}}}, "min is more than max"),
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


def test_one_place_names_the_engines_of_ray() -> None:
    """Tables of engines take the place of the model in the arguments of Ray's application."""
    args = application({"ray": RAY, "config": CONFIG})["applications"][0]["args"]
    assert args == {"config": "/etc/latimer/latimer.toml"}


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


def test_the_version_of_ray_is_that_of_the_image() -> None:
    """The version for KubeRay is that of Ray which `make image-ray` installs."""
    version = re.search(
        r"^RAY := (.*)$", (DEPLOY.parents[1] / "Makefile").read_text(), re.MULTILINE
    )
    assert version
    assert service({"ray": RAY})["rayClusterConfig"]["rayVersion"] == version[1]
