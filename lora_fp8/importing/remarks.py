"""What the reports of several importers say about settings that differ."""

from __future__ import annotations

from ..errors import Message

NOT_HERE = Message("nothing like it here")
ALWAYS_CACHED = Message("pictures and captions are always encoded beforehand, into dataset.cache_dir")
OTHER_CACHE = Message("caches of other tools are not read; ours is made anew in dataset.cache_dir")
ATTENTION = Message("attention is always torch's scaled_dot_product_attention")
LOGGING = "events.jsonl and log.txt in the run folder hold everything; trackers are not fed"
UPLOAD = Message("files are not uploaded")
RESUMES = Message("their states cannot be read; `lora-fp8 resume` goes on with our own runs")
NO_MASK = Message("masks are used as they are drawn here: dataset.folders.N.mask")
MASK_AREA = Message(
    "theirs divides the loss by the mask's area, so that a small mask counts as much as a large one; ours does not"
)
NO_REG = Message(
    "the base's own answers are not trained on here, nor counted in an epoch; pictures with captions of their "
    "own can be a folder with regularization = true"
)
SHOWN_ALIKE = Message(
    "a folder with regularization = true; there they are shown as often as the others, here each `repeats` times "
    "an epoch, chosen to come to the same where the pictures are here"
)
FULL_STRENGTH = Message("the LoRA trains at full strength on every folder")
NO_EMA = Message("no moving average of the weights is kept here")
START = Message("its rank must be adapter.rank")
NO_SWAP = Message("here a share of the frozen weights may wait in main memory instead: memory.offload")
NO_CONV = Message(
    "convolutions are adapted where adapter.targets names them, such as conv1, with a rank in adapter.ranks"
)
SAVED = Message("the LoRA files of that step, and a checkpoint to go on from")
NO_SPREAD = Message(
    "frames are never spread over a whole clip here, which would make it move faster; see dataset.frames"
)
NO_SAMPLER = Message("previews are drawn with the model's own scheduler")
