// Browser notifications when a job ends. A button asks for them, never the page by itself. The windows of a browser share
// one cursor, and one of them asks at a time, so that each job is announced once.
const NOTIFY = { on: "lora_fp8_notify", seen: "lora_fp8_notified" };
const notifyPermission = () => (window.isSecureContext && window.Notification ? Notification.permission : "");
const isNotifying = () => localStorage.getItem(NOTIFY.on) === "on" && notifyPermission() === "granted";
const askEnded = async (after) => {
  const answer = await send(`/ended?after=${after}&language=${LANGUAGE}`, { cache: "no-store" });
  return answer.ok ? answer.json() : null;
};
const paintNotify = () => {
  for (const button of document.querySelectorAll("#notify")) {
    const text = isNotifying() ? button.dataset.on : button.dataset.off;
    if (button.textContent !== text) button.textContent = text;
    const pressed = String(isNotifying());
    if (button.ariaPressed !== pressed) button.ariaPressed = pressed;
  }
};
const switchNotify = async (button) => {
  const note = button.parentElement.querySelector("[role=status]");
  note.textContent = "";
  if (isNotifying()) {
    localStorage.removeItem(NOTIFY.on);
  } else if (!notifyPermission()) {
    note.textContent = button.dataset.unable;
  } else if ((await Notification.requestPermission()) === "granted") {
    const now = await askEnded(0);
    localStorage.setItem(NOTIFY.seen, String(now?.now ?? Date.now() / 1000));
    localStorage.setItem(NOTIFY.on, "on");
  } else {
    note.textContent = button.dataset.denied;
  }
  paintNotify();
};
const announce = (job) => {
  const notice = new Notification(job.title, { body: job.body, tag: `lora-fp8-${job.id}-${job.ended}`, icon: "/icon.svg" });
  notice.addEventListener("click", () => {
    window.focus();
    location.assign(job.link);
  });
};
const announceEnded = async () => {
  if (!isNotifying()) return;
  await navigator.locks.request(NOTIFY.on, { ifAvailable: true }, async (held) => {
    const after = Number(localStorage.getItem(NOTIFY.seen));
    const answer = held && after ? await askEnded(after) : null;
    for (const job of (answer?.jobs ?? []).reverse()) {
      localStorage.setItem(NOTIFY.seen, String(job.ended));
      announce(job);
    }
  });
};
const notifyForEver = async () => {
  for (;;) {
    await pause(5000);
    await announceEnded().catch(() => {});  // the server has exited: ask.js says so
  }
};
document.addEventListener("click", ({ target }) => {
  const button = target.closest?.("#notify");
  if (button) switchNotify(button);
});
document.addEventListener("DOMContentLoaded", () => {
  new MutationObserver(paintNotify).observe(document.body, { childList: true, subtree: true });
  notifyForEver();
});
