// Requests of the page to its server. Runs before Gradio's own scripts: app.py puts it at the beginning of the page, with
// LANGUAGE, LOST, DISMISS and the texts of the scripts that follow.

// If the page's server has exited, say so in the page's language (Gradio does in English), and reload the page as soon as
// the server answers, whatever it answers: it may ask for the password again.
const send = window.fetch.bind(window);
const answers = async () => {
  try {
    await send("/icon.svg", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    return true;
  } catch {
    return false;
  }
};
const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
let leaving = false;
let asking = false;
window.addEventListener("pagehide", () => { leaving = true; });
window.addEventListener("pageshow", () => { leaving = false; });
const suspect = async () => {
  if (asking) return;
  asking = true;
  const since = new Date().toLocaleTimeString(LANGUAGE);
  await pause(300);
  if (!leaving && !(await answers())) {
    const bar = document.createElement("p");
    bar.id = "lost";
    bar.setAttribute("role", "alert");
    bar.textContent = LOST.replace("{time}", since);
    // What is typed now could not be sent, and the reload would discard it.
    for (const part of document.body.children) part.inert = true;
    document.body.prepend(bar);
    document.body.classList.add("lost");
    while (!(await answers())) await pause(500);
    location.reload();
  }
  asking = false;
};
// Each window names itself: the files that it uploads are valid for this window only (uploads.py).
const WINDOW = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
const addWindow = ([what, options = {}]) => {
  const headers = new Headers(options.headers ?? what.headers);
  headers.set("x-lora-fp8-page", WINDOW);
  return [what, { ...options, headers }];
};
// Show an error of the server (error_boundary.py) in one place and once, since a failing tick fails every second. It stays
// until it is closed, or has not been repeated for as long as it takes to read it.
const UNSAID = 10000;  // ms
let saidLast = { line: "", at: 0, closed: false };
const problem = (line) => {
  const again = line === saidLast.line && Date.now() - saidLast.at < UNSAID;
  saidLast = { line, at: Date.now(), closed: again && saidLast.closed };
  if (again) return;
  document.getElementById("problem")?.remove();
  const box = document.createElement("div");
  box.id = "problem";
  box.setAttribute("role", "alert");
  const text = document.createElement("p");
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "\u00d7";
  button.setAttribute("aria-label", DISMISS);
  button.addEventListener("click", () => { saidLast.closed = true; box.remove(); });
  box.append(text, button);
  document.body.append(box);
  text.textContent = line;  // last: screen readers read what is added to a live region
  const fade = () => {
    const held = box.matches(":hover, :focus-within") || document.hidden;
    if (held || Date.now() - saidLast.at < Math.max(UNSAID, 80 * line.length)) setTimeout(fade, 1000);
    else box.remove();
  };
  setTimeout(fade, 1000);
};
// `answer`: a handler's answer; `failed`: there is none. Gradio reports that, but whatever waits for the answer (head.js)
// would wait for ever.
const handleAnswer = (answer, failed) => {
  if (answer?.problem) problem(answer.problem);
  if (failed) window.unanswered?.();
};
const ask = async (given) => {
  try {
    return await send(...addWindow(given));
  } catch (error) {
    if (error instanceof TypeError) suspect();  // not AbortError, which is intended
    throw error;
  }
};
// Gradio sends requests in parallel: the first may be handled last, and the older of two answers may come last, and stay.
// So each request waits until the one before it was answered. Events of the queue are answered later (queue/join only
// accepts them): an event that must keep the order is bound with queue=False.
const SLOWEST = 15000;  // ms; an answer that never comes must not block the page for ever
let turn = Promise.resolve();
const inTurn = (question) => new Promise((answered, failed) => {
  turn = turn.then(() => {
    const asked = question();
    asked.then(answered, failed);
    return Promise.race([asked.catch(() => {}), pause(SLOWEST)]);
  });
});
// After the queue's last answer the server (Gradio 6.31) closes the stream of answers. If the page learns of that after the
// next request was accepted, it would wait for ever for the answer at a closed stream, and the button would be dead. So
// the end of the stream is hidden from the page, and the stream is opened again.
const completed = new Set();
const taken = new Set();  // accepted by the queue and not completed
let joining = 0;
const join = async (given) => {
  joining += 1;
  try {
    const answer = await ask(given);
    const body = await answer.text();
    const id = answer.ok && JSON.parse(body).event_id;
    if (id && !completed.delete(id)) taken.add(id);
    return new Response(body, answer);
  } finally {
    joining -= 1;
  }
};
const openStream = async (given) => {
  const first = await ask(given);
  if (!first.ok) return first;
  const follow = async (answers, out) => {
    const reader = answers.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    let ended = false;
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      const events = (rest + piece.value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const message = JSON.parse(event.replace(/^data:/, ""));
        if (message.msg === "process_completed") handleAnswer(message.output, !message.success);
        if (message.msg === "process_completed" && !taken.delete(message.event_id)) completed.add(message.event_id);
        ended = message.msg === "close_stream" && joining + taken.size > 0;
        if (!ended) out.enqueue(new TextEncoder().encode(`${event}\n\n`));
      }
    }
    if (ended) await follow(await ask(given), out);
  };
  let left = false;  // true when the page has stopped reading
  return new Response(new ReadableStream({
    start: (out) => { follow(first, out).then(() => left || out.close(), (error) => out.error(error)); },
    cancel: () => { left = true; },
  }), first);
};
window.fetch = (...given) => {
  const { pathname } = new URL(given[0]?.url ?? given[0], location);
  if (pathname.endsWith("/queue/data")) return openStream(given);
  if (pathname.endsWith("/queue/join")) return inTurn(() => join(given));
  if (!pathname.includes("/gradio_api/run/")) return ask(given);
  return inTurn(async () => {
    const answer = await ask(given);
    const body = await answer.text();  // the whole body: its head alone changes nothing
    handleAnswer(body.includes('"problem":') ? JSON.parse(body) : null, !answer.ok);
    return new Response(body, answer);
  });
};
