"""The web page. It writes a TOML config, submits jobs and reads run folders; it never imports torch and never trains.

Site
    app.py               the site in two languages: pages, routes, frame
    server.py            `lora-fp8 ui`
    startup.py           work of Gradio that is skipped while the site starts
    guard.py             checks every request: Host, Origin, login, size; adds the security headers
    login.py             the account, its sessions and failed logins
    error_boundary.py    turns exceptions into one sentence for the user and one line in the log
    uploads.py           which uploaded files a call may name
    gradio_sessions.py   what Gradio keeps in memory for each open page
    file_routes.py       /picture and /download, below the allowed folders
    report_route.py      /report: the report of a run as a download
    tour.py              the tour of the pages, offered on the first visit
    notifications.py     the end of a job, in the browser and at a webhook
    decoder.py           child processes that decode images and videos
    api.py, mcp.py       six functions for programs: as HTTP endpoints and as MCP tools
What the pages share
    context.py           language, allowed folders and links (`Place`, `Ui`)
    translations.py      every sentence in English and Chinese, from texts/*.toml
    sanitize.py          paths below the allowed folders, file names, text as HTML
    live_panel.py        HTML that ticks keep up to date, with buttons that call Python
    json_table.py        JSON as HTML tables
    setting_values.py    values of settings as people read them
    engine.py            commands that need torch, run in processes of their own
New training
    form.py              the settings as form fields; the TOML text that all views edit
    draft.py             that text on disk, shared by all windows
    base_models.py       base models, presets and configs that a training can start from
    image_folders.py     folders of images: finding, counting, uploading
    importer.py          settings of other trainers
    estimate_panel.py    steps, epochs, time, memory and disk space of the draft
    submission.py        checks a config's paths and submits it to the queue
Dataset
    dataset_folder.py    the open folder: captions, tags, findings, captioning jobs
Runs
    run_monitor.py       jobs, run folders and GPUs, read once a second for everyone; what the buttons do
    run_cards.py         a run's state, figures and buttons as HTML
    remote_jobs.py       trainings on other machines: how each is doing, and its buttons
    hub_uploads.py       uploads to the Hugging Face Hub, as jobs of the queue
pages/                   one file per page; `build(ui)` lays it out
"""

from .startup import import_without_stubs

import_without_stubs()
