// The page: its views, the key, the model, and the colour scheme.

import * as analysis from "./analysis.js";
import * as api from "./api.js";
import * as fleet from "./fleet.js";
import * as heatmap from "./heatmap.js";
import * as request from "./request.js";
import * as sampling from "./sampling.js";
import * as stored from "./stored.js";
import * as workbench from "./workbench.js";
import { $, counted, el, say, visible } from "./dom.js";

const VIEWS = { generate: {}, analysis, request: { enter: request.draw }, stored, fleet };
// The views that show tokens.
const COLOURED = ["generate", "analysis", "stored"];
const wide = matchMedia("(min-width: 900px)");
let models = [];

const current = () => models.find((one) => one.id === $("model").value);
const page = {
  model: () => $("model").value,
  seesImages: () => current()?.architecture?.input_modalities?.includes("image") ?? false,
  allowed: () => sampling.allow(current(), workbench.mode()),
  failed(error) {
    if (error.status === 401) askForKey();
  },
};

function askForKey() {
  $("key-field").hidden = false;
  $("key").focus();
}

// A model that only speaks or transcribes has no view here.
const isForAudio = (model) =>
  (model.capabilities ?? []).some((word) => word === "speech" || word === "transcription");

async function loadModels() {
  try {
    models = (await api.get("models")).data.filter((one) => !isForAudio(one));
  } catch (error) {
    page.failed(error);
    say(error.message, true);
    return;
  }
  const chosen = $("model").value || sessionStorage.getItem("latimer.model");
  const options = () => models.map((one) => el("option", { value: one.id }, visible(one.id)));
  $("model").replaceChildren(...options());
  $("model-b").replaceChildren(el("option", { value: "" }, "the same model"), ...options());
  $("stored-models").replaceChildren(...options());
  if (models.some((one) => one.id === chosen)) $("model").value = chosen;
  chooseModel();
  say(models.length === 1 ? "Ready." : `Ready: ${counted(models.length, "model")}.`);
}

function chooseModel() {
  sessionStorage.setItem("latimer.model", $("model").value);
  const model = current();
  $("model-facts").textContent = model?.context_length ? `${model.context_length} tokens of context` : "";
  page.allowed();
  workbench.redraw();
}

function show(name) {
  const view = name in VIEWS ? name : "generate";
  heatmap.closePopover();
  for (const [one, { leave }] of Object.entries(VIEWS)) {
    const tab = $(`tab-${one}`);
    if (!$(one).hidden && one !== view) leave?.();
    $(one).hidden = one !== view;
    tab.setAttribute("aria-selected", String(one === view));
    tab.tabIndex = one === view ? 0 : -1;
  }
  $("colours").hidden = !COLOURED.includes(view);
  VIEWS[view].enter?.();
}

function tabs() {
  const names = Object.keys(VIEWS);
  for (const name of names) $(`tab-${name}`).addEventListener("click", () => (location.hash = name));
  $("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = names[(names.indexOf(location.hash.slice(1) || "generate") + step + names.length) % names.length];
    location.hash = next;
    $(`tab-${next}`).focus();
  });
  addEventListener("hashchange", () => show(location.hash.slice(1)));
}

function scheme(name) {
  if (name) document.documentElement.dataset.scheme = name;
  else delete document.documentElement.dataset.scheme;
  localStorage.setItem("latimer.scheme", name);
}

$("scheme").value = localStorage.getItem("latimer.scheme") ?? "";
scheme($("scheme").value);
$("scheme").addEventListener("change", () => scheme($("scheme").value));
$("key").value = api.key.get();
$("key").addEventListener("change", () => {
  api.key.set($("key").value);
  loadModels();
});
$("key-button").addEventListener("click", () => {
  $("key-field").hidden = !$("key-field").hidden;
});
$("model").addEventListener("change", chooseModel);
$("measure-field").append(heatmap.measureSelect());
const unfold = () => ($("settings").open = $("history").open = wide.matches);
unfold();
wide.addEventListener("change", unfold);
// What was said of one action ends with the next one.
for (const kind of ["click", "change"]) {
  document.addEventListener(kind, ({ target }) => {
    if (!workbench.isRunning() && target.closest?.("button, select, input, textarea")) say("");
  }, true);
}
sampling.build();
heatmap.listen();
heatmap.legend();
request.listen();
stored.listen();
tabs();
analysis.listen(page);
await workbench.listen(page);
show(location.hash.slice(1));
await loadModels();
document.documentElement.dataset.ready = "true";
