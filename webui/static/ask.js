// How the page asks its server. Runs before Gradio's own scripts: app.py puts it at the beginning of the page, with
// LANGUAGE and LOST.

// Where the page's program has ended, say so in the page's language (Gradio tells it in English), and open the page
// anew as soon as it answers: whatever it answers, for it may ask for the password again.
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
    document.body.prepend(bar);
    document.body.classList.add("lost");
    while (!(await answers())) await pause(500);
    location.reload();
  }
  asking = false;
};
const ask = async (given) => {
  try {
    return await send(...given);
  } catch (error) {
    if (error instanceof TypeError) suspect();  // not AbortError: that was meant
    throw error;
  }
};
// Gradio asks side by side: what is meant first may be done last, and of two answers the older may come last, and stay.
// So each question waits until the one before it was answered, in the order in which they were asked. What the queue
// works on answers later (queue/join only takes it in): an event that must be in this order is bound with queue=False.
const SLOWEST = 15000;  // ms; an answer that never comes must not stop the page for ever
let turn = Promise.resolve();
const inTurn = (question) => new Promise((answered, failed) => {
  turn = turn.then(() => {
    const asked = question();
    asked.then(answered, failed);
    return Promise.race([asked.catch(() => {}), pause(SLOWEST)]);
  });
});
// When the queue has told the last answer, the server (Gradio 6.31) closes the stream of answers. Where the page hears of
// that after the next question was taken in, it would wait for that answer at a stream that is closed, for ever, and
// the button that asked would be dead. So here the end is kept from it, and the stream opened again.
const completed = new Set();
const taken = new Set();  // by the queue, and not completed
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
const streamed = async (given) => {
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
        const told = JSON.parse(event.replace(/^data:/, ""));
        if (told.msg === "process_completed" && !taken.delete(told.event_id)) completed.add(told.event_id);
        ended = told.msg === "close_stream" && joining + taken.size > 0;
        if (!ended) out.enqueue(new TextEncoder().encode(`${event}\n\n`));
      }
    }
    if (ended) await follow(await ask(given), out);
  };
  let left = false;  // by the page, which reads no further than its end
  return new Response(new ReadableStream({
    start: (out) => { follow(first, out).then(() => left || out.close(), (error) => out.error(error)); },
    cancel: () => { left = true; },
  }), first);
};
window.fetch = (...given) => {
  const { pathname } = new URL(given[0]?.url ?? given[0], location);
  if (pathname.endsWith("/queue/data")) return streamed(given);
  if (pathname.endsWith("/queue/join")) return inTurn(() => join(given));
  if (!pathname.includes("/gradio_api/run/")) return ask(given);
  return inTurn(async () => {
    const answer = await ask(given);
    return new Response(await answer.arrayBuffer(), answer);  // the whole of it: its head alone changes nothing
  });
};
