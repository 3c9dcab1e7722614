// Before Gradio has drawn the page it is empty, for seconds on a slow network: say that it loads, and if it does not, what to
// do. What fails in these scripts later is told like an error of the server, and the page goes on.
const HEADER = ".site-header";
const showLoading = () => {
  const text = document.createElement("p");
  text.id = "loading";
  text.setAttribute("role", "status");
  text.style = "position: fixed; inset: 40% 16px auto; margin: 0; text-align: center; font: 16px/1.6 system-ui, sans-serif";
  text.textContent = LOADING.now;
  paint();  // the theme; style.css comes with Gradio
  document.body.prepend(text);
  const slow = setTimeout(() => { text.textContent = LOADING.slow; }, SLOWEST);
  const drawn = new MutationObserver(() => {
    if (!document.querySelector(HEADER)) return;
    drawn.disconnect();
    clearTimeout(slow);
    text.remove();
  });
  drawn.observe(document.body, { childList: true, subtree: true });
};
new MutationObserver((_, begun) => {
  if (!document.body) return;
  begun.disconnect();
  showLoading();
}).observe(document.documentElement, { childList: true });
window.addEventListener("error", ({ target, message, filename }) => {
  const loading = document.getElementById("loading");
  if (target !== window) {  // a script or a style sheet of the page itself
    if (loading && target.matches?.("script, link[rel=stylesheet]")) loading.textContent = LOADING.slow;
  } else if (message?.startsWith("ResizeObserver loop")) {
    // The browser only postponed a measurement to its next frame, as on a phone when a long view is opened.
  } else if (filename?.split(/[?#]/)[0] === location.href.split(/[?#]/)[0]) {
    problem(LOADING.failed.replace("{what}", message));
  }
}, true);
