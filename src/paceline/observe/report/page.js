"use strict";
// Draws the figures. Each is JSON beside its place; colours come from the page's style, so that they follow its scheme.
const paceline = (() => {
  const drawn = [];
  const hidden = new Set();
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function colour(meta) {
    if (meta.state === undefined) return css(`--colour-${meta.colour % 8}`);
    return css(`--state-${meta.state}`) || css("--state-other");
  }

  function trace(spec) {
    const meta = spec.meta || {};
    const made = { ...spec, visible: !hidden.has(meta.run) };
    if (spec.type === "heatmap") {
      made.colorbar = { ...spec.colorbar, outlinewidth: 0, tickfont: { color: css("--ink") } };
    } else {
      const tint = colour(meta);
      made.marker = { ...spec.marker, color: tint };
      if (spec.type === "scatter") made.line = { ...spec.line, color: tint };
      if (meta.faint) made.opacity = 0.35;
    }
    return made;
  }

  function axis(spec) {
    return { gridcolor: css("--rule"), linecolor: css("--rule"), zerolinecolor: css("--rule"), automargin: true, ...spec };
  }

  function layout(spec, traces) {
    const narrow = innerWidth < 640;
    const made = {
      height: (narrow ? 320 : 400) + (narrow ? 18 * Math.max(0, traces - 3) : 0), // the legend takes its part
      margin: { l: 56, r: 12, t: 12, b: 48 },
      paper_bgcolor: css("--ground"),
      plot_bgcolor: css("--ground"),
      font: { color: css("--ink"), family: "system-ui, sans-serif", size: narrow ? 11 : 12 },
      hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--rule"), font: { color: css("--ink") } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      ...spec,
    };
    for (const key of Object.keys(made).filter((key) => /^[xy]axis/.test(key))) made[key] = axis(made[key]);
    made.shapes = (spec.shapes || []).filter((shape) => !hidden.has(Number(shape.name.slice(4)))).map((shape) => ({
      ...shape, line: { ...shape.line, color: css(`--colour-${Number(shape.name.slice(4)) % 8}`) },
    }));
    return made;
  }

  function view(figure) {
    const made = layout(figure.layout, figure.traces.length);
    if (figure.overSteps && figure.range) made.xaxis = { ...made.xaxis, range: figure.range };
    if (figure.yType) made.yaxis = { ...made.yaxis, type: figure.yType };
    if (made.yaxis.type === "log") made.yaxis = { ...made.yaxis, dtick: "D2" };
    return made;
  }

  function put(figure) {
    const place = document.getElementById(`plot-${figure.name}`);
    Plotly.react(place, figure.traces.map(trace), view(figure), { displayModeBar: false, responsive: true, doubleClick: "reset" });
  }

  // The script that calls this lies behind a figure's JSON.
  function draw() {
    const data = document.currentScript.previousElementSibling;
    const figure = { name: data.dataset.figure, ...JSON.parse(data.textContent) };
    put(figure);
    drawn.push(figure);
    const root = document.documentElement.dataset;
    root.firstFigureMs ??= performance.now().toFixed(0);
    root.lastFigureMs = performance.now().toFixed(0);
    root.figures = drawn.length;
  }

  function listen() {
    const form = document.getElementById("view");
    const loss = drawn.find((figure) => figure.name === "loss");
    form.classList.add("ready");
    form.elements.log.checked = form.elements.log.defaultChecked = loss !== undefined && loss.layout.yaxis.type === "log";
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const [from, to] = [form.elements.from, form.elements.to].map((field) => (field.value === "" ? null : Number(field.value)));
      for (const figure of drawn.filter((one) => one.overSteps)) {
        figure.range = from === null && to === null ? null : [from ?? 0, to ?? ends(figure)];
        put(figure);
      }
    });
    form.addEventListener("reset", () => {
      hidden.clear();
      for (const figure of drawn) figure.range = figure.yType = null;
      showRuns();
    });
    form.addEventListener("change", (event) => {
      if (event.target.name === "log" && loss !== undefined) {
        loss.yType = event.target.checked ? "log" : "linear";
        put(loss);
      }
      if (event.target.name === "run") {
        const run = Number(event.target.value);
        if (event.target.checked) hidden.delete(run); else hidden.add(run);
        showRuns();
      }
    });
  }

  const ends = (figure) => Math.max(...figure.traces.map((one) => one.x[one.x.length - 1] ?? 0));

  function showRuns() {
    for (const section of document.querySelectorAll("section[data-run]")) section.hidden = hidden.has(Number(section.dataset.run));
    drawn.forEach(put);
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(put));
  document.addEventListener("DOMContentLoaded", listen);
  return { draw, drawn };
})();
