"""The page's state is true whatever the order in which answers come: they are held back here until told."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from PIL import Image
from playwright.sync_api import Page, Route, expect

from lora_fp8 import jobs
from tests.ui.conftest import Site
from tests.ui.test_form_path import opened, view
from tests.ui.test_runs_state import Trainer
from webui import form, translations
from webui.draft import Draft

ASKED = """() => {
  const real = window.fetch;
  window.asked = [];
  window.fetch = (url, given) => { window.asked.push(String(given?.body)); return real(url, given); };
}"""
"""Keeps what Gradio asks for, whether it is sent at once or not."""
END_LATE = """(() => {
  const real = window.fetch;
  const late = new Promise((done) => { window.end = done; });
  window.fetch = async (...given) => {
    const answer = await real(...given);
    if (!(given[0]?.url ?? String(given[0])).includes("/queue/data")) return answer;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const pull = async (out) => {
      const { done, value } = await reader.read();
      if (done) return out.close();
      for (const event of value.split(/(?<=\\n\\n)/)) {
        if (event.includes("close_stream")) { window.ends = true; await late; }
        out.enqueue(new TextEncoder().encode(event));
      }
    };
    return new Response(new ReadableStream({ pull }), answer);
  };
})()"""
"""Holds back the end of the stream of answers until `end` is called; `ends`: it has come."""


SECOND = {"bubbles": True, "detail": 2}
"""What makes a click the second of two."""


class Held:
    """Holds back the first answer in which `told` stands, to a question in which `part` does."""

    def __init__(self, page: Page, part: str = "", told: str = ""):
        self.page, self.part, self.told = page, part, told
        self.held: list[tuple[Route, object]] = []
        page.evaluate(ASKED)
        page.route("**/gradio_api/run/**", self._hold)

    def _hold(self, route: Route) -> None:
        if self.held or self.part not in (route.request.post_data or ""):
            return route.continue_()
        answer = route.fetch()
        if self.told in answer.text():
            return self.held.append((route, answer))
        return route.fulfill(response=answer)

    def wait(self) -> None:
        """Until the answer is held."""
        while not self.held:
            self.page.evaluate("new Promise(requestAnimationFrame)")

    def asked(self, part: str) -> None:
        """Until the page has asked for another thing, and had time for an answer that does not wait for this one."""
        self.page.wait_for_function("part => window.asked.some((one) => one.includes(part))", arg=part)
        self.page.evaluate("fetch('/icon.svg').then((answer) => answer.text())")

    def release(self) -> None:
        """Let it come."""
        [(route, answer)] = self.held
        route.fulfill(response=answer)


def test_an_answer_of_the_queue_comes_though_its_stream_was_just_closed(visit: Callable[..., Page]) -> None:
    page = visit("tools")
    page.add_init_script(END_LATE)
    page.reload()
    field, result = page.get_by_label("LoRA file"), page.locator("#tool-result .wrong")
    field.fill("/etc/one.safetensors")
    field.press("Enter")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(result).to_contain_text("one.safetensors")
    page.wait_for_function("window.ends")
    field.fill("/etc/two.safetensors")
    field.press("Enter")
    with page.expect_response("**/queue/join**"):
        page.get_by_role("button", name="Run", exact=True).click()
    page.evaluate("window.end()")
    expect(result).to_contain_text("two.safetensors")


def test_two_clicks_do_it_once(site: Site, visit: Callable[..., Page]) -> None:
    queue = jobs.Queue(site.home)
    text = 'name = "twice"\noutput_dir = "{}"\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "p"'
    id = queue.submit(
        text.format(site.root / "runs"), scheduling=jobs.Scheduling(gpus="77")
    )  # of a group that is not there: it waits
    queue.cancel(id)
    page = visit()
    known = {job.id for job in queue.list_jobs(shell=False)}
    rerun = page.locator(f'[data-job="{id}"] [data-do=rerun]')
    rerun.click()
    expect(page.locator("#said")).to_contain_text("twice")
    rerun.dispatch_event("click", SECOND)
    page.get_by_label(translations.say("en", "runs.kind.ended")).check()
    [made] = [job.id for job in queue.list_jobs(shell=False) if job.id not in known]
    expect(page.locator(f'[data-job="{made}"]')).to_have_count(0)  # by an answer that came after
    assert [job.id for job in queue.list_jobs(shell=False) if job.id not in known] == [made]
    queue.cancel(made)

    Draft(site.home).write('name = "kept"\n')
    page = visit("new")
    opened(page)
    page.locator("#new-files").get_by_role("button").first.click()
    page.click("#new-reset")
    name = page.locator("#new-name textarea, #new-name input").first
    expect(name).not_to_have_value("kept")
    page.click("#new-back")
    expect(name).to_have_value("kept")
    opened(page)
    page.dispatch_event("#new-back", "click", SECOND)
    view(page, 2)
    expect(page.locator("#new-toml .cm-content")).to_contain_text('name = "kept"')
    Draft(site.home).write(form.START)


def test_what_is_typed_on_settings_stays(visit: Callable[..., Page], tmp_path: Path) -> None:
    page = visit("settings")
    paths = {kind: page.locator(f"#{kind}-path textarea, #{kind}-path input").first for kind in ("root", "models")}
    expect(page.locator("#about")).to_contain_text("gradio 6.")
    paths["models"].fill("/somewhere/else")
    paths["root"].fill(str(tmp_path))
    page.click("#root-add")
    expect(page.locator("#roots")).to_contain_text(str(tmp_path))
    expect(paths["root"]).to_have_value("")
    expect(paths["models"]).to_have_value("/somewhere/else")
    page.click("#root-remove")
    expect(page.locator("#roots")).not_to_contain_text(str(tmp_path))


def test_what_is_typed_while_a_choice_is_answered_stands(site: Site, visit: Callable[..., Page]) -> None:
    Draft(site.home).write(form.START)
    page = visit("new")
    opened(page)
    page.evaluate("""() => {
      const real = window.chosen;
      window.taken = 0;
      window.chosen = () => { real(); window.taken += 1; };
    }""")
    late: list[Route] = []
    page.route("**/queue/join**", lambda route: late.append(route))
    steps = page.locator("#new-train-steps").locator("input, textarea").first
    page.locator("#new-presets .choice-card", has_text=translations.say("en", "new.goal.style")).click()  # 2000 steps
    while not late:
        page.evaluate("new Promise(requestAnimationFrame)")
    steps.fill("1500")
    late.pop().continue_()
    page.wait_for_function("taken === 1")
    expect(steps).to_have_value("1500")
    view(page, 2)
    expect(page.locator("#new-toml .cm-content")).to_contain_text("steps = 1500")
    expect(page.locator("#new-toml .cm-content")).to_contain_text("style")
    Draft(site.home).write(form.START)


def test_each_button_counts_while_another_waits_for_its_answer(site: Site, visit: Callable[..., Page]) -> None:
    queue = jobs.Queue(site.home)
    text = 'name = "n{}"\noutput_dir = "{}"\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "p"'
    ids = [queue.submit(text.format(n, site.root / "runs"), scheduling=jobs.Scheduling(gpus="77")) for n in range(2)]
    page = visit()
    one, other = (page.locator(f'[data-job="{id}"]') for id in ids)
    expect(other).to_be_visible()
    held = Held(page, '"sooner"')
    one.locator("[data-do=sooner]").click()
    held.wait()
    other.locator("[data-do=cancel]").click()
    one.locator("[data-do=sooner]").click()  # no answer yet: again?
    held.asked('"cancel"')
    held.release()
    expect(other.locator(".state")).to_have_text(translations.say("en", "state.cancelled"))
    expect(one.locator(".figures")).to_contain_text(translations.say("en", "runs.priority"))
    queue.cancel(ids[0])
    assert queue.get_job(ids[0]).priority == 1


def test_a_preview_that_was_chosen_stays_when_a_newer_one_comes(site: Site, visit: Callable[..., Page]) -> None:
    def draw(step: int) -> None:
        Image.new("RGB", (64, 64), "red").save(samples / f"{step}.png")
        one.say(event="preview", step=step, prompts=["a ball"], images=[f"samples/{step}.png"])

    one = Trainer(site.root / "runs" / "follows")
    samples = one.folder / "samples"
    samples.mkdir()
    for step in (0, 10, 20):
        draw(step)
    page = visit(f"run?run={quote(str(one.folder))}")
    page.get_by_role("tab", name=translations.say("en", "run.tab.previews")).click()
    right, names = page.locator("#right input"), page.locator("#pair .names")
    expect(right).to_have_value("Step 20")
    draw(30)
    expect(right).to_have_value("Step 30")
    expect(names).to_contain_text("Step 30")
    held = Held(page, told="Step 40")
    draw(40)
    held.wait()
    right.click()
    page.get_by_role("option", name="Step 10", exact=True).click()
    expect(right).to_have_value("Step 10")
    held.release()
    expect(page.locator("#grid")).to_contain_text("Step 40")
    expect(names).to_contain_text("Step 10")
    expect(right).to_have_value("Step 10")
    one.die()
