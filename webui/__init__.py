"""The page: writes a TOML, submits a job, reads run folders. Never imports torch, and never trains in its own process.

app.py       the two-language site: its pages, its routes, its frame    serve.py   `lora-fp8 ui`
safe.py      what a browser may name, and what it is shown              submit.py  the one way into the queue
guard.py     in front of every route: Host, Origin, login, headers      login.py   who may in
files.py     pictures and downloads, below the roots                    decoder.py the processes that decode
api.py       six functions for programs                                 sessions.py what is kept of each open page
thrift.py    what Gradio need not do before a page opens
context.py   what every page is given: language, roots, queue
words.py     every sentence of the page in English and Chinese, from texts/*.toml
form.py      a training's settings from their declarations; the one text that all views of the form work on
draft.py     the training that is being set up, on the server's disk
bases.py     what a training can start from: base models, presets, configs
pictures.py  folders of pictures, and taking in uploads
album.py     a folder of pictures: captions, tags, the doctor's report, captioning as a job
importer.py  settings of other trainers, for the form
outlook.py   what a training will take: steps, time, memory
pages/       one file, one page; `build(ui)` lays it out
"""

from .thrift import import_without_stubs

import_without_stubs()
