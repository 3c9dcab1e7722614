"""Where base models come from: what a person may name, what is known of it, and how it gets onto this machine.

    reference.py      parses `model.path`: an id, an address, a path
    known_bases.py    the released models of every family, from known_bases.toml
    description.py    what a base is and needs, before a weight is transferred
    hosts.py          Hugging Face, ModelScope and Civitai, and what their errors mean
    selection.py      which files of a repository training needs
    headers.py        headers of safetensors files, by range requests
    remembered.py     what hubs answered, for times without a connection
    download.py       gets the missing files: progress, resume, checksums; transfer.py is one file of them
    places.py         where files are put: the cache of huggingface_hub, or a folder of our own

Nothing here imports torch, so the page, the command line and the queue use it too.
"""

from .description import BaseDescription, BaseFile, Gate, Header, Licence, describe
from .reference import WEIGHT_ENDINGS, Reference, parse

__all__ = [
    "WEIGHT_ENDINGS",
    "BaseDescription",
    "BaseFile",
    "Gate",
    "Header",
    "Licence",
    "Reference",
    "describe",
    "parse",
]
