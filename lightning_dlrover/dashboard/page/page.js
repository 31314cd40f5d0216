// The page of `dlrover serve`: draws what the stream of events describes. Text from records is inserted as text nodes only.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const PARTS = [["compute", "compute"], ["data", "waits for data"], ["wait", "waits for slower workers"], ["comm", "exchange of gradients"], ["other", "other"]];
const SETTINGS = {
  loader_workers: n => counted(n, "loader worker"), intra_op_threads: n => n ? counted(n, "thread") : "a thread for each core",
  prefetch_factor: n => `${n} batches ahead`, node_cpus: n => counted(n, "core"), node_memory_mb: n => bytes(n * 2 ** 20),
};
const ENDED = ["finished", "failed", "cancelled", "interrupted", "ended", "stopped"];
const STALE_MS = 20000;  // without any message from the server
const name = location.pathname.startsWith("/job/") ? decodeURIComponent(location.pathname.slice(5)) : null;
const page = { jobs: new Map(), pools: [], job: {}, workers: new Map(), numWorkers: 0, source: null, heard: 0, control: false, now: 0 };
let token = sessionStorage.getItem("token") || "";

if (location.hash.startsWith("#token=")) {
  token = decodeURIComponent(location.hash.slice(7));
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname);
}

// --- elements ---------------------------------------------------------------------------------------------------------------

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") element.addEventListener(key, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== "") element.append(child);  // text becomes a text node
  }
  return element;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const at = id => document.getElementById(id);

// --- texts ------------------------------------------------------------------------------------------------------------------

function number(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}
function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${number(value * 1000)} ms`;
  if (value < 120) return `${value < 9.95 ? number(value) : Math.round(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.floor(value % 3600 / 60)} min`;
  return `${(value / 86400).toFixed(1)} d`;
}
const percent = (value, digits = 0) => value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
const bytes = value => value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`;
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const clock = value => new Date(1000 * value).toLocaleTimeString("en-GB");
const chip = word => h("span", { class: `chip ${/^[a-z]+$/.test(word) ? word : ""}` }, word);
const link = run => h("a", { href: `/job/${encodeURIComponent(run)}` }, run);

function moment(value) {
  const date = new Date(1000 * value);
  const day = date.toDateString() === new Date(1000 * page.now).toDateString() ? "" : date.toLocaleDateString("en-GB", { day: "numeric", month: "short" }) + " ";
  return h("span", { class: "quiet", title: date.toString() }, day + clock(value));
}
function workersText(job) {
  const wanted = job.wanted_workers !== null && job.wanted_workers !== job.num_workers ? ` of ${job.wanted_workers} wanted` : "";
  return `${job.num_workers}${wanted}`;
}
function limitsText(job) {
  return job.max_workers === null ? "" : job.min_workers === job.max_workers ? `fixed at ${job.max_workers}` : `${job.min_workers} to ${job.max_workers} allowed`;
}
function progressText(job) {
  const p = job.progress;
  if (!p) return "";
  const parts = [];
  if (p.percent !== null) parts.push(`${p.percent.toFixed(p.percent < 10 ? 1 : 0)} %`);
  if (p.seconds_left !== null && !ENDED.includes(job.state)) parts.push(`${seconds(p.seconds_left)} left`);
  parts.push(`epoch ${p.epoch + 1}${p.max_epochs ? ` of ${p.max_epochs}` : ""}`);
  parts.push(`step ${number(p.step)}`);
  if (p.loss) parts.push(`loss ${p.loss}`);
  return parts.join(" · ");
}
const rate = job => ENDED.includes(job.state) ? null : job.samples_per_s;

// --- charts -----------------------------------------------------------------------------------------------------------------

function bar(shares) {
  const box = h("div", { class: "bar" });
  for (const [kind, share] of shares) {
    const part = h("i", { class: kind });
    part.style.width = `${Math.max(0, Math.min(100, 100 * share))}%`;
    box.append(part);
  }
  return box;
}
function spark(points) {
  if (points.length < 2) return "";
  const t0 = points[0][0], t1 = points[points.length - 1][0], top = Math.max(...points.map(p => p[1])) || 1;
  const xy = points.map(p => `${(110 * (p[0] - t0) / (t1 - t0 || 1)).toFixed(1)},${(25 - 23 * p[1] / top).toFixed(1)}`);
  return s("svg", { class: "spark", viewBox: "0 0 110 26", role: "img", "aria-label": "throughput over time" },
    s("polyline", { class: "curve", points: xy.join(" ") }));
}
function ticks(top) {
  const step = 10 ** Math.floor(Math.log10(top / 2 || 1));
  const each = [1, 2, 5, 10].map(f => f * step).find(f => top / f <= 4) || top;
  const found = [];
  for (let value = 0; value <= top * 1.0001; value += each) found.push(value);
  return found;
}

// A chart over the job's time. `draw` gets functions from time and value to coordinates, and returns its elements.
function chart(card, job, top, unit, draw, describe, legend) {
  const width = Math.max(280, card.clientWidth - 34), height = 200, left = 58, bottom = 22;
  const from = job.started_at || job.series[0].at;
  const to = Math.max(from + 1, ENDED.includes(job.state) ? job.newest_at : job.at);
  const x = time => left + (width - left - 6) * (Math.max(from, time) - from) / (to - from);
  const y = value => height - bottom - (height - bottom - 8) * value / top;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": card.dataset.label });
  for (const value of ticks(top)) {
    svg.append(s("line", { class: "grid", x1: left, x2: width - 6, y1: y(value), y2: y(value) }));
    svg.append(s("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, unit(value)));
  }
  const count = width > 600 ? 5 : 3;
  for (let i = 0; i <= count; i++) {
    const time = from + (to - from) * i / count;
    const anchor = i === 0 ? "start" : i === count ? "end" : "middle";
    svg.append(s("text", { x: x(time), y: height - 5, "text-anchor": anchor }, clock(time).slice(0, to - from < 600 ? 8 : 5)));
  }
  svg.append(...draw(x, y, from, to));
  for (const round of job.rounds) {
    if (round.at < from || round.kind === "start") continue;
    const isLoss = round.kind === "loss";
    const title = `${clock(round.at)} ${round.kind}: ${counted(round.num_workers, "worker")}, ${round.reason}`;
    svg.append(s("line", { class: `mark ${isLoss ? "loss" : ""}`, x1: x(round.at), x2: x(round.at), y1: 8, y2: height - bottom }, s("title", {}, title)));
    if (isLoss) svg.append(s("text", { class: "lost", x: Math.min(x(round.at) + 4, width - 60), y: 18 }, "worker lost"));
  }
  const cross = s("line", { class: "cross", y1: 8, y2: height - bottom, visibility: "hidden" });
  svg.append(cross);
  const line = h("div", { class: "legend" }, ...legend);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const time = from + (to - from) * ((event.clientX - box.left) * width / box.width - left) / (width - left - 6);
    const near = describe(time);
    if (!near) return;
    cross.setAttribute("visibility", "visible");
    cross.setAttribute("x1", x(near.at));
    cross.setAttribute("x2", x(near.at));
    line.replaceChildren(`${clock(near.at)}: ${near.text}`);
  });
  svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); line.replaceChildren(...legend); });
  card.replaceChildren(card.firstElementChild, svg, line);
}
const nearest = (points, time) => points.reduce((best, p) => !best || Math.abs(p.at - time) < Math.abs(best.at - time) ? p : best, null);
const key = (kind, text) => h("span", {}, h("b", { class: kind }), text);

function throughputChart(card, job) {
  const points = job.series;
  const most = Math.max(1, job.max_workers || 1, ...points.map(p => p.num_workers));
  const top = 1.15 * Math.max(...points.map(p => p.samples_per_s)) || 1;
  chart(card, job, top, number, (x, y, from, to) => {
    const xy = points.map(p => `${x(p.at).toFixed(1)},${y(p.samples_per_s).toFixed(1)}`);
    const area = `${x(points[0].at)},${y(0)} ${xy.join(" ")} ${x(points[points.length - 1].at)},${y(0)}`;
    const sizes = [];
    let last = null;
    for (const round of job.rounds.filter(r => r.at >= from)) {
      if (last !== null) sizes.push(`${x(round.at)},${y(top * last / most * 0.95)}`);
      last = round.num_workers;
      sizes.push(`${x(round.at)},${y(top * last / most * 0.95)}`);
    }
    if (last !== null) sizes.push(`${x(to)},${y(top * last / most * 0.95)}`);
    return [s("polygon", { class: "under", points: area }), s("polyline", { class: "curve", points: xy.join(" ") }), s("polyline", { class: "steps", points: sizes.join(" ") })];
  }, time => {
    const p = nearest(points, time);
    return p && { at: p.at, text: `${number(p.samples_per_s)} samples/s with ${counted(p.num_workers, "worker")}` };
  }, [key("curve-key", "samples/s"), key("steps-key", `workers (top: ${most})`), key("loss-key", "worker lost")]);
}
function partsChart(card, job) {
  const points = job.series.filter(p => p.parts);
  const sum = p => PARTS.reduce((total, [part]) => total + p.parts[`${part}_s`], 0);
  const top = 1.1 * Math.max(...points.map(sum)) || 1;
  const shown = PARTS.filter(([part]) => points.some(p => p.parts[`${part}_s`] > 0.002 * top));
  chart(card, job, top, seconds, (x, y) => {
    const below = points.map(() => 0);
    return shown.map(([part]) => {
      const low = points.map((p, i) => `${x(p.at).toFixed(1)},${y(below[i]).toFixed(1)}`);
      points.forEach((p, i) => { below[i] += p.parts[`${part}_s`]; });
      const high = points.map((p, i) => `${x(p.at).toFixed(1)},${y(below[i]).toFixed(1)}`);
      return s("polygon", { class: part, points: [...low, ...high.reverse()].join(" ") });
    });
  }, time => {
    const p = nearest(points, time);
    return p && { at: p.at, text: `${seconds(sum(p))}: ` + shown.map(([part, text]) => `${text} ${seconds(p.parts[`${part}_s`])}`).join(", ") };
  }, shown.map(([part, text]) => key(part, text)));
}

// --- all jobs ---------------------------------------------------------------------------------------------------------------

function row(job) {
  const p = job.progress;
  return h("tr", {},
    h("td", { class: "text whole" }, link(job.run_id), " ", chip(job.state)),
    h("td", { class: "narrow", "data-name": "workers" }, workersText(job), " ", h("span", { class: "quiet" }, job.max_workers === null ? "" : `(${job.min_workers}–${job.max_workers})`)),
    h("td", { class: "number", "data-name": "samples/s" }, number(rate(job))),
    h("td", { class: "narrow" }, spark(job.spark)),
    h("td", { class: "number", "data-name": "goodput" }, percent(job.goodput)),
    h("td", { class: "whole" }, p && p.percent !== null ? bar([["", p.percent / 100]]) : "", h("span", { class: "quiet" }, progressText(job))),
    h("td", { class: "text whole quiet" }, h("span", { class: "clamp", title: job.last_event }, job.last_event)));
}
function drawJobs() {
  const jobs = [...page.jobs.values()].sort((a, b) => ENDED.includes(a.state) - ENDED.includes(b.state) || (a.run_id < b.run_id ? -1 : 1));
  const running = jobs.filter(job => !ENDED.includes(job.state));
  const heads = ["job", "workers", "samples/s", "throughput", "goodput", "progress", "last event"];
  const head = h("tr", {}, heads.map(text => h("th", { class: ["samples/s", "goodput"].includes(text) ? "number" : "" }, text)));
  const table = h("table", { class: "cards" }, h("thead", {}, head), h("tbody", {}, jobs.map(row)));
  const title = h("h2", {}, "Jobs ", h("span", { class: "quiet" }, `${counted(running.length, "job")} running or waiting, ${jobs.length - running.length} ended, ${counted(running.reduce((n, job) => n + job.num_workers, 0), "worker")} training`));
  const none = h("p", { class: "quiet" }, "No jobs yet. `dlrover run` starts one.");
  at("main").replaceChildren(...page.pools.map(pool), h("section", { class: "card" }, title, jobs.length ? table : none));
}
function pool(p) {
  const used = Object.entries(p.budget).map(([resource, limit]) => {
    const share = limit > 0 ? (p.used[resource] || 0) / limit : 0;
    const unit = resource === "memory_mb" ? v => bytes(v * 2 ** 20) : number;
    return h("div", {}, h("div", { class: "facts" }, `${resource === "memory_mb" ? "memory" : resource}: ${unit(p.used[resource] || 0)} of ${unit(limit)}`), bar([[share > 1 ? "full" : "", share]]));
  });
  const rows = p.jobs.map(job => h("tr", {},
    h("td", { class: "text whole" }, link(job.job), " ", chip(job.state)),
    h("td", { "data-name": "workers" }, job.workers ? `${job.workers} (${job.min_workers}–${job.max_workers})` : `asks for ${job.min_workers === job.max_workers ? job.max_workers : `${job.min_workers} to ${job.max_workers}`}`),
    h("td", { class: "text", "data-name": "owner" }, job.owner),
    h("td", { class: "text whole quiet" }, (job.place ? `place ${job.place} in the queue${job.expected_at > page.now ? `, starts in about ${seconds(job.expected_at - page.now)}` : ""}${job.reason ? ": " : ""}` : "") + job.reason)));
  const by = p.decider ? `${p.decider} decides, by policy ${p.policy}` : "no process decides: jobs keep their sizes, and waiting ones wait";
  const head = h("tr", {}, ["job", "workers", "owner", ""].map(text => h("th", {}, text)));
  return h("section", { class: "card" }, h("h2", {}, `Pool ${p.pool} `, h("span", { class: "quiet" }, by)), h("div", { class: "tiles" }, used),
    rows.length ? h("table", { class: "cards" }, h("thead", {}, head), h("tbody", {}, rows)) : h("p", { class: "quiet" }, "no jobs"));
}

// --- one job ----------------------------------------------------------------------------------------------------------------

const drawn = new Map();  // sections of the job's page, by id
function section(id, title, quiet) {
  let card = drawn.get(id);
  if (!card) {
    card = h("section", { class: "card", "data-label": title });
    drawn.set(id, card);
  }
  card.replaceChildren(h("h2", {}, title, " ", h("span", { class: "quiet" }, quiet || "")));
  return card;
}
function tile(text, value, quiet) {
  return h("div", { class: "tile" }, h("div", { class: "quiet" }, text), h("div", { class: "value" }, value), h("div", { class: "quiet" }, quiet || ""));
}
function layout() {
  const get = id => drawn.get(id) || drawn.set(id, h("section", { class: "card", "data-label": id })).get(id);
  drawn.set("head", h("div", {}));
  drawn.set("tiles", h("div", { class: "tiles" }));
  at("main").replaceChildren(drawn.get("head"), drawn.get("tiles"), h("div", { class: "two" }, get("throughput"), get("parts")),
    h("div", { class: "two" }, h("div", { class: "stack" }, get("plan"), get("state")), get("rounds")), get("workers"), get("events"));
}
function drawJob(changed) {
  const job = page.job;
  if (!job.run_id) {
    at("main").replaceChildren(h("section", { class: "card" }, h("h1", {}, name), h("p", {}, page.source && page.source.problem || "No records of this job were found yet."), h("p", {}, h("a", { href: "/" }, "All jobs"))));
    drawn.clear();
    return;
  }
  if (!drawn.size) { layout(); changed = null; }
  const has = (...keys) => changed === null || keys.some(each => changed.has(each));
  drawHead(job);
  drawTiles(job);
  if (has("series", "rounds", "state")) {
    const plotted = job.series.length > 1;
    const throughput = section("throughput", "Throughput", "all workers together");
    if (plotted) throughputChart(throughput, job); else throughput.append(h("p", { class: "quiet" }, "not measured yet"));
    const parts = section("parts", "Where a step's time goes", "rank 0");
    if (job.series.filter(p => p.parts).length > 1) partsChart(parts, job); else parts.append(h("p", { class: "quiet" }, "not measured yet"));
  }
  if (has("plan", "prediction", "sizes", "num_workers")) drawPlan(job);
  if (has("rounds")) drawRounds(job);
  if (has("workers", "joiners", "state")) drawWorkers(job);
  if (has("events")) drawEvents(job);
  if (has("streams", "snapshot", "problems", "controller", "held_up", "target")) drawState(job);
}
function drawHead(job) {
  const p = job.progress;
  drawn.get("head").replaceChildren(
    h("div", { class: "title" }, h("h1", {}, job.run_id), chip(job.state), controls(job)),
    job.message ? h("p", { class: "facts" }, job.message) : "",
    p ? h("p", { class: "facts quiet" }, progressText(job)) : "",
    p && p.percent !== null ? bar([["", p.percent / 100]]) : "");
}
function drawTiles(job) {
  const step = job.parts ? PARTS.reduce((total, [part]) => total + job.parts[`${part}_s`], 0) : null;
  drawn.get("tiles").replaceChildren(
    tile("workers", workersText(job), limitsText(job)),
    tile("throughput", rate(job) === null ? "–" : `${number(rate(job))} /s`, "samples of all workers"),
    tile("step", step === null ? "–" : seconds(step), job.global_batch_size ? `${number(job.global_batch_size)} samples` : ""),
    tile("goodput", percent(job.goodput, 1), "time in steps that counted"),
    tile("workers lost", number(job.num_losses), counted(job.num_rounds, "round")),
    tile("pauses", seconds(job.stall_s), "for changes of workers"));
}
function drawPlan(job) {
  const plan = job.plan, p = job.prediction;
  const card = section("plan", "Plan", plan ? `by the ${plan.owner}${plan.is_binding ? "" : ", a recommendation"}` : "");
  if (plan) {
    const each = Object.entries(plan.settings).map(([setting, value]) => SETTINGS[setting] ? SETTINGS[setting](value) : `${setting} ${value}`).join(", ");
    card.append(h("p", { class: "facts" }, h("b", {}, counted(plan.num_workers, "worker")), each ? `, each with ${each}` : ""), h("p", { class: "facts quiet" }, plan.reason));
  } else card.append(h("p", { class: "quiet" }, "no plan yet"));
  if (p) card.append(h("p", { class: "facts" }, `Predicted ${seconds(p.step_s)} a step (${seconds(p.low_s)} to ${seconds(p.high_s)}), measured ${seconds(p.measured_s)}: ${p.is_inside ? "inside" : "outside"} the interval.`));
  if (job.sizes.length) {
    const top = Math.max(...job.sizes.map(size => size.high_per_s)) || 1;
    const cells = job.sizes.flatMap(size => [
      h("span", { class: size.num_workers === job.num_workers ? "here" : "" }, counted(size.num_workers, "worker")),
      bar([["", size.samples_per_s / top]]),
      h("span", { title: `${number(size.low_per_s)} to ${number(size.high_per_s)} samples/s` }, `${number(size.samples_per_s)} /s `, h("span", { class: "quiet" }, size.is_measured ? "measured" : "predicted"))]);
    card.append(h("h2", {}, "Speed by number of workers"), h("div", { class: "sizes" }, cells));
  }
}
function drawRounds(job) {
  const rows = [...job.rounds].reverse().slice(0, 12).map(round => h("tr", {},
    h("td", { class: "narrow" }, moment(round.at)), h("td", { class: "narrow" }, chip(round.kind)),
    h("td", { class: "narrow", "data-name": "workers" }, String(round.num_workers)), h("td", { class: "narrow", "data-name": "pause" }, round.stall_s === null ? "" : seconds(round.stall_s)),
    h("td", { class: "text whole quiet" }, h("span", { class: "clamp", title: round.reason }, round.reason))));
  const card = section("rounds", "Changes of workers", job.num_rounds > rows.length ? `newest ${rows.length} of ${job.num_rounds}` : "");
  const head = h("tr", {}, ["time", "change", "workers", "pause", "reason"].map(text => h("th", {}, text)));
  card.append(rows.length ? h("table", { class: "cards" }, h("thead", {}, head), h("tbody", {}, rows)) : h("p", { class: "quiet" }, "none yet"));
}
function workerRow(worker) {
  const total = worker.parts ? PARTS.reduce((sum, [part]) => sum + worker.parts[`${part}_s`], 0) : 0;
  const shares = total ? PARTS.map(([part]) => [part, worker.parts[`${part}_s`] / total]) : [];
  const memory = worker.peak_memory_bytes || worker.memory_bytes, limit = worker.memory_limit_bytes;
  const slow = worker.slow_factor;
  return h("tr", {},
    h("td", { class: "narrow", "data-name": "rank" }, worker.rank === null ? "–" : String(worker.rank)),
    h("td", { class: "narrow" }, chip(worker.state)),
    h("td", { class: "text whole" }, [worker.node, worker.host].filter(Boolean).join(" on "), h("div", { class: "quiet" }, worker.waits || worker.worker_id)),
    h("td", { class: "whole" }, shares.length ? bar(shares) : "", total ? h("span", { class: "quiet" }, seconds(total)) : ""),
    h("td", { class: "number", "data-name": "speed" }, slow === null || page.numWorkers < 2 ? "" : slow > 1.02 ? `${slow.toFixed(2)} × slower` : "as the others"),
    h("td", { class: "number", "data-name": "samples" }, worker.samples === null ? "" : number(worker.samples)),
    h("td", { "data-name": "memory" }, memory ? `${bytes(memory)}${limit ? ` of ${bytes(limit)}` : ""}` : "", limit ? bar([[memory / limit > 0.9 ? "full" : "", memory / limit]]) : ""),
    h("td", { class: "narrow" }, page.control && token && worker.rank !== null && !ENDED.includes(page.job.state) ? ["drain", "replace"].map(action => h("button", { type: "button", click: () => ask(action, { worker: worker.worker_id }) }, action === "drain" ? "Drain" : "Replace")) : ""));
}
function drawWorkers(job) {
  const shown = [...page.workers.values()].sort((a, b) => (a.rank ?? 1e9) - (b.rank ?? 1e9));
  const hidden = page.numWorkers - shown.length;
  const card = section("workers", "Workers", hidden > 0 ? `${shown.length} of ${page.numWorkers}: those that need attention first` : "");
  if (job.joiners.length) card.append(h("p", { class: "facts" }, "Joining: ", job.joiners.slice(0, 20).map(j => `${j.node} ${j.stage}`).join(", ")));
  const heads = ["rank", "state", "node and host", "parts of a step", "speed", "samples", "memory (peak)", ""];
  const head = h("tr", {}, heads.map(text => h("th", { class: ["speed", "samples"].includes(text) ? "number" : "" }, text)));
  card.append(shown.length ? h("div", { class: "scroll" }, h("table", { class: "cards" }, h("thead", {}, head), h("tbody", {}, shown.map(workerRow)))) : h("p", { class: "quiet" }, "none"),
    shown.some(w => w.parts) ? h("div", { class: "legend" }, PARTS.map(([part, text]) => key(part, text))) : "");
}
function drawEvents(job) {
  const items = [...job.events].reverse().map(event => h("li", {}, moment(event.at), chip(event.kind), h("span", {}, event.text)));
  section("events", "Events", "newest first").append(items.length ? h("ol", { class: "events" }, items) : h("p", { class: "quiet" }, "none yet"));
}
function drawState(job) {
  const card = section("state", "Data, state and nodes");
  const line = (text, quiet) => card.append(h("p", { class: "facts" }, text, " ", h("span", { class: "quiet" }, quiet || "")));
  for (const stream of job.streams) {
    line(stream.text, stream.rows_skipped ? `${counted(stream.rows_skipped, "row")} skipped` : "");
    if (stream.num_rows && stream.rows_done !== null) {
      line(`epoch ${stream.epoch + 1}: ${number(stream.rows_done)} of ${counted(stream.num_rows, "row")}`, stream.rows_per_s ? `${number(stream.rows_per_s)} rows/s` : "");
      card.append(bar([["", stream.rows_done / stream.num_rows]]));
    }
  }
  const snapshot = job.snapshot;
  if (snapshot) {
    line(snapshot.at ? `snapshot of tables: batch ${number(snapshot.batch)}` : "no snapshot of tables yet");
    if (snapshot.at) card.append(moment(snapshot.at));
    if (snapshot.failure) line(`snapshots fail: ${snapshot.failure}`);
  }
  line(`nodes: ${job.target || "started by others"}`, job.controller ? `controller: ${job.controller}` : "no controller");
  if (job.held_up) line(job.held_up);
  for (const problem of job.problems) line(`unreadable record: ${problem}`);
}

// --- changes, with a token --------------------------------------------------------------------------------------------------

function controls(job) {
  if (!page.control || ENDED.includes(job.state)) return "";
  if (!token) return h("span", { class: "controls" }, h("button", { type: "button", click: askToken }, "Unlock changes"));
  const wanted = job.wanted_workers ?? job.num_workers, unit = job.workers_per_node || 1;
  const to = count => h("button", { type: "button", click: () => ask("scale", { num_workers: count }) }, count > wanted ? `+ ${unit} worker${unit > 1 ? "s" : ""}` : `− ${unit} worker${unit > 1 ? "s" : ""}`);
  return h("span", { class: "controls" }, wanted + unit <= (job.max_workers ?? 0) ? to(wanted + unit) : "", wanted - unit >= (job.min_workers ?? 1) ? to(wanted - unit) : "",
    h("button", { type: "button", click: () => ask("hold", { num_workers: job.num_workers }) }, "Hold size"), h("button", { type: "button", click: () => ask("auto", {}) }, "Automatic size"));
}
function askToken() {
  const field = h("input", { type: "password", autocomplete: "off", "aria-label": "token" });
  const form = h("form", { method: "dialog" }, h("p", {}, "Token of this page, from the file given to --token-file"), field, " ", h("button", {}, "Use"));
  form.addEventListener("submit", () => { token = field.value.trim(); sessionStorage.setItem("token", token); drawJob(null); });
  open(form);
}
function open(...children) {
  const dialog = at("dialog");
  dialog.replaceChildren(...children);
  if (!dialog.open) dialog.showModal();
}
async function post(action, body) {
  const answer = await fetch(`/api/jobs/${encodeURIComponent(name)}/${action}`, { method: "POST", headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` }, body: JSON.stringify(body) });
  const found = await answer.json().catch(() => ({}));
  if (answer.status === 401) { token = ""; sessionStorage.removeItem("token"); drawJob(null); }
  return { ok: answer.ok, text: found.text || found.error || `the server answered ${answer.status}` };
}
async function ask(action, body) {
  const close = h("button", { type: "button", click: () => at("dialog").close() }, "Close");
  open(h("p", { class: "quiet" }, "Asking for the expected effects."));
  const expected = await post(action, { ...body, dry_run: true }).catch(error => ({ ok: false, text: String(error) }));
  const go = h("button", { type: "button", class: "danger", click: async () => {
    go.disabled = true;
    const done = await post(action, body).catch(error => ({ ok: false, text: String(error) }));
    open(h("p", {}, done.text), close);
  } }, "Do it");
  open(h("p", {}, expected.text), expected.ok ? go : "", " ", close);
}

// --- the stream -------------------------------------------------------------------------------------------------------------

function showSource() {
  const away = Date.now() - page.heard > STALE_MS, source = page.source;
  const problem = away ? "This page's server does not answer. It tries again by itself; what is shown is old." : source && source.problem ? source.problem : "";
  const isLive = !away && source && source.is_connected;
  at("link").className = `link ${isLive ? "live" : "away"}`;
  at("link").textContent = isLive ? "live" : source && source.as_of ? `as of ${clock(source.as_of)}` : "no records";
  if (source) at("place").textContent = source.place;
  at("notice").hidden = !problem || (name && !page.job.run_id);
  at("notice").textContent = problem;
}
function take(message) {
  page.heard = Date.now();
  page.now = message.now;
  page.control = message.control;
  if (message.source) page.source = message.source;
  const changed = new Set(Object.keys(message.set));
  if (message.items.length || message.gone.length) changed.add("workers");
  const items = name === null ? page.jobs : page.workers, id = name === null ? "run_id" : "worker_id";
  if (message.full) { page.job = {}; items.clear(); drawn.clear(); }
  for (const gone of message.gone) items.delete(gone);
  for (const item of message.items) items.set(item[id], item);
  if (name === null) {
    if (message.set.pools) page.pools = message.set.pools;
    if (message.full || changed.size) drawJobs();
  } else {
    Object.assign(page.job, message.set);
    page.job.at = message.now;
    page.numWorkers = message.num_items;
    if (message.full || changed.size) drawJob(message.full ? null : changed);
    document.title = page.job.run_id ? `${page.job.run_id}: ${page.job.state}` : `${name}: not found`;
  }
  showSource();
  if (!document.documentElement.dataset.painted) {
    requestAnimationFrame(() => { document.documentElement.dataset.painted = String(Math.round(performance.now())); });
  }
}
function follow() {
  const stream = new EventSource(name === null ? "/api/events" : `/api/events?job=${encodeURIComponent(name)}`);
  stream.onmessage = event => take(JSON.parse(event.data));
  stream.onerror = () => {
    if (stream.readyState === EventSource.CLOSED) setTimeout(follow, 3000);  // the server refused; it may be starting
    showSource();
  };
}
follow();
setInterval(showSource, 2000);
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { if (name !== null && page.job.run_id) drawJob(null); }, 150); });
