"""Remarks that the reports of several importers share."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import Joined, Message, Template

NOT_HERE = Message("this trainer has no such feature")
ALWAYS_CACHED = Message("this trainer always caches latents and text embeddings before training, in dataset.cache_dir")
OTHER_CACHE = Message("this trainer does not read caches of other trainers; it builds its own in dataset.cache_dir")
ATTENTION = Message("attention always uses torch's scaled_dot_product_attention")
LOGGING = Message("the run folder holds the logs (events.jsonl and log.txt); [tracking] sets trackers")
UPLOAD = Message("this trainer does not upload files")
RESUMES = Message("checkpoints of other trainers cannot be read; `lora-fp8 resume` continues only runs of this trainer")
NO_MASK = Message("this trainer uses masks as they are drawn; set their folder in dataset.folders.N.mask")
MASK_AREA = Message(
    "ai-toolkit divides the loss by the mask's area, as this trainer does with objective.normalize_mask = true"
)
BASE_AS_TARGET = Message("the folder has regularization = true; its target is the prediction of the base model")
SHOWN_ALIKE = Message(
    "the folder has regularization = true. The other trainer uses as many regularization images per epoch as "
    "training images; this trainer uses each one `repeats` times, and repeats gives the same number if the "
    "images are on this machine"
)
FULL_STRENGTH = Message("the LoRA trains at full strength on every folder")
EMA_EACH_STEP = Message("this trainer updates the EMA every step; optimizer.ema_decay was adapted to that")
START = Message("the rank of this file must equal adapter.rank")
NO_SWAP = Message("this trainer can offload a share of the frozen weights to RAM instead: memory.offload")
NO_CONV = Message(
    "convolutions are trained only if adapter.targets names them (conv1, for example); adapter.ranks sets their rank"
)
SAVED = Message("this trainer saves the LoRA files of that step, and a checkpoint to resume from")
NO_SPREAD = Message(
    "this trainer never spreads frames over a whole clip, because motion would become faster; see dataset.frames"
)
NO_SAMPLER = Message("previews use the model's own scheduler")
EMBEDDING = Message("these settings train an embedding (textual inversion)")
CONTROLNET = Message("these settings train a ControlNet")
BATCH_OF_ALL = Template("{batch} x {processes}: train.batch_size counts the images of all processes together")
RATE_OF_DENOISER = Template("{rate_key} sets the denoiser's learning rate")
LOGIT_NORMAL = Template("this trainer has no {method}; logit_normal was written")
COMPILED = Message("this trainer compiles each kind of repeated block once (regional compilation)")
OF_ANOTHER_KIND = Message("this kind of LoRA does not use this setting")
VALIDATION = Message(
    "set validation.every and validation.pictures for a validation loss; these images are held out of the training "
    "folders"
)
DTYPE = Message("model.dtype sets the dtype of everything that is not quantized")
TARGETS = Message("adapter.targets lists the target modules, and adapter.ranks sets their ranks")
NO_CONTROLNET = Message("this trainer does not train ControlNets")
SUMMED = Message("this trainer sums gradients in float32 and updates all weights together")
END = Message("training ends at train.steps")
ONLY_MIN_SNR = Message("objective.weighting offers min_snr, soft_min_snr and debiased")
NOISING = Message("the model's scheduler_config.json decides how noise is added")
EACH_TIMESTEP = Message("every timestep is drawn independently")
TIMESTEPS = Message("this trainer uses no list of timesteps; objective.timesteps sets their distribution")
OWN_ATTENTION = Message("attention masks follow the model's pipeline")
PADDING = Message("captions are padded as in the model's pipeline")
PROMPT_LENGTH = Message("the token limit is that of the model's pipeline")
BUCKET_STEP = Message("bucket sides are multiples of dataset.bucket_step")
UPSCALE = Message("dataset.upscale decides whether small images are enlarged or get smaller buckets")
SCALED = Message("images are scaled to their bucket")
FOLDER_WEIGHTS = Message("a folder's share follows from its number of images and its repeats")
NEVER_DELETED = Message("this trainer never deletes your files")
PROMPTS_WRITTEN = Message("this trainer has no prompt libraries; write the prompts in preview.prompts")
NO_RESCALE = Message("this trainer does not rescale guidance")
CENTER_CROP = Message("this trainer crops images at the centre, or at random with dataset.random_crop")
BUCKETS = Message("buckets follow from dataset.resolution and dataset.max_aspect")
MAX_ASPECT = Message("no image is excluded because of its aspect ratio; wider images are cropped to dataset.max_aspect")
CAPTION_FILES = Message(
    "this trainer reads captions from .txt or .caption files beside the images; `lora-fp8 dataset import FILE` "
    "writes them"
)
A_LORA = Message("these settings train a LoRA")
FOLDERS_OF = Template("add the folders that {file} lists; that file is not on this machine")
NO_PROMPTS = Message("no preview prompts were written")
RUN_FOLDER = Message("each run gets a folder with the job's name in it")
FOR_ALL_FOLDERS = Message("this trainer has one value for all folders")
CHECK_RANK = Template("this trainer has no {kind}; check rank and alpha of the LoRA")
NO_EMBEDDINGS = Message("this trainer does not train embeddings")
ONE_LOSS = Message("this trainer has one loss (objective.loss), weighted by objective.weighting")
NO_COLOURS = Message("this trainer does not change colours in this way")
CACHED_VARIANTS = Message(
    "this trainer uses a fixed number of cached versions of each image (dataset.image_variants); the other trainer "
    "makes a new version each time"
)
ONE_VERSION = Message(
    "OneTrainer caches one version of each image, changed once at random; this trainer leaves the image unchanged"
)
FILE_FORMAT = Message("LoRA files are .safetensors; export.formats sets their layout")
RECOMPUTED = Message("this trainer recomputes activations instead of offloading them to RAM")
FULL_BITS = Message("the optimizer state has 32 bits instead of 8")
AVERAGED = Message("schedule-free AdamW was written")
STEP_OF_ADAMW = Message(
    "Muon's updates have the size of AdamW's in this trainer, so the learning rate may need a change"
)
NO_OTHER_SCHEDULES = Message("this trainer does not load schedulers of other packages")
OF_CUSTOM_SCHEDULES = Message("this setting is used only by custom schedulers")
LAYER_STORAGE = Message("quantize.keep and quantize.override set the storage of individual layers")
DENOISER = Message("this trainer always trains the denoiser")
NOT_AN_ARGUMENT = Message("no optimizer of this trainer has this argument")
NO_ROTATION = Message("this trainer does not rotate images by a fixed angle")
EVERY_EPOCHS = Template("{epochs} epochs x {steps} steps; this trainer counts steps, not epochs")
CLIP_SKIP = Message("the model's pipeline decides which layer of the text encoder is used")
TWICE = Message("the loss is the same, but twice as large in this trainer")
TEXT_TO_THE_END = Message("text encoders are trained until the end")
NO_FIRST_FRAME = Message("this trainer has no image-to-video training")
IN_EACH_FOLDER = Message("each folder has its own value")
MERGE_BEFOREHAND = Message("this trainer does not merge LoRAs into the base model; merge them before training")
CAPTIONS_READ = Message(".txt and .caption files are read automatically")
RENAME_CAPTIONS = Message("this trainer reads captions from .txt and .caption files; rename your caption files")
CAPTION_SUFFIX = Template(
    "dataset.folders: caption files end in {suffix}, but this trainer reads .txt and .caption; rename them"
)
ALL_TAGS = Message("all tags are used from the first step")
WHOLE_STATE = Message("every checkpoint holds the complete training state")
DESCRIPTION = Message("export.description sets the text in the LoRA file")
LARGEST = Message("dataset.resolution is the largest; folders with another resolution have their own")
NO_NUMBER = Template("{value} is not a number")
WHOLE_MODEL = Message("each process holds the whole model")
GUIDANCE = Message("the model always gets objective.guidance")
NOT_STABILIZED = Message("this trainer's AdamW has no additional stabilization")
ONE_ASPECT = Message("dataset.max_aspect limits the aspect ratio of all folders")
LOCAL_FILE = Message("this must be a file on this machine; download it from the hub, and give its path")
NOT_MERGED = Message("this trainer does not merge LoRAs into the base model")
ONCE_FOR_EACH = Message("the folder is listed once for each resolution, which trains the same")
OTHER_BLOCKS = Message("the number of blocks does not match the model")
DRAWS = Message("these settings generate images")
CHANGES_A_FILE = Message("these settings change a LoRA file (`lora-fp8 resize` and `lora-fp8 merge` do that)")
WHOLE_RANGE = Message("all noise levels are trained alike")
ONE_CAPTION = Message("this trainer reads one caption per image")
MASTERS = Template("float32 master weights (optimizer.rounding) replace {what_else}")
DECOUPLED = Message("weight decay is decoupled, as in AdamW")
EIGHT_BITS = Message("the optimizer state has 8 bits instead of 32")
TEXT_NOT_TRAINED = Message("text encoders are not trained")
ONE_RATE = Message("Prodigy finds one learning rate for all trained weights")
BELONGS_TO = Template("this setting is used only with {key}")
COUNTS = Template("{key} takes precedence")
TEXT_FREED = Message("this trainer frees the text encoders before training")
NOT_PAGED = Message("the optimizer state is not paged to RAM")
ONE_COMPILE_MODE = Message("memory.compile = 'blocks' has only one mode")
ROUNDING = Message("optimizer.rounding decides how small weight updates are kept")
ANOTHER_PART = Message("this setting is for another part of the model")
PREVIEWS_OFF = Message("previews are off")
NOT_PROMPTED = Message("the file has no preview prompts")
NOT_PREVIEWED = Message("the file has no previews")
NEEDS_FAMILY = Message("this setting depends on the architecture, which the file does not name")
AT_LEAST = Template("the minimum is {least}")
WIDEST_BUCKET = Message("the widest bucket of the other trainer has this aspect ratio")
ANY_ASPECT = Template("{tool} keeps the aspect ratio of every image; this is the largest value of this trainer")
AT_MOST = Template("the maximum is {most}")
PREVIEWS_PNG = Message("previews are .png files")
BLOCKS_NOT_FP8 = Message("the optimizer state has 8-bit blocks instead of FP8")
OTHER_OPTIMIZERS = Message("the settings page keeps these values for other optimizers")
COUNTED = Message("these are statistics of the settings page")
VERSION = Message("this is the version of the file format")
OF_PAGE = Message("only the settings page uses this setting")
KAHAN = Message("Kahan summation")
UNIFORM = Message("timesteps are drawn uniformly, without weights by timestep")
ONLY_SAFETENSORS = Message("this trainer reads components only from .safetensors files")
OFF = Message("this setting is off")
EMPTY = Message("this setting is empty")
TOOLS_DEFAULT = Template("not in the file; {tool} uses this default")
UNUSED_WITH = Template("this setting is not used with {key} = {value}")
UNUSED_BY = Template("{name} does not use this setting")
TRAINS_ALL = Template("{name} trains the whole model; this trainer trains a LoRA instead")
BY_SCRIPT = Template("the file does not name the architecture, because {tool} takes it from its training script")
TABLE_WITH = Template("{table} with {key}")
BOTH = Template("{first} and {second}")
READ_TOO = Message("this file was read too")
FILE_NOT_FOUND = Message("this file was not found")
PUT_BESIDE = Template("{key} = {path} was not found. Put the file beside {file}, and import again")
NO_TABLE = Template("{path}: the file has no table of settings")
OTHER_KEY = Message("another setting is used instead")
OTHER_ARCHITECTURE = Message("this setting is for another architecture")
UNUSED_WITHOUT = Template("this setting has no effect without {key}")
UNUSED_BESIDE = Template("this setting has no effect with {key}")
IS_ON = Template("{name} is on")
SETS = Template("this sets {setting}")
CHOOSE_ANOTHER = Template("this trainer has no {name}; choose another value")
MINUS_ONE = Message("the other trainer's -1 is 0 in this trainer")
WHOLE_MATRICES = Message("whole matrices are trained")
CAST_WITHOUT_SCALE = Template(
    "{tool} casts weights without a scale, so small ones become zero; this trainer has one scale per row. "
    "quantize.scale = 'none' is the exact equivalent, in a UNet together with quantize.convolutions = 'fp8'"
)
DROPOUT_FOR_ALL = Message("dataset.caption_dropout drops captions for all text encoders together")
OWN_ENCODERS = Message("this trainer uses the text encoders of the base model, or those of model.components")
PREVIEW_STRENGTH = Message("this trainer draws previews with the LoRA at strength 1")
CONTROL_BY_HAND = Message(
    "control images were not converted; for an editing model, set them in dataset.folders.N.control"
)
TIMES_ROOT = Template("the learning rate is multiplied by the square root of {number}")

COUNTS_STEPS = Message("checkpoint.every counts steps")
COUNTS_CHECKPOINTS = Message("checkpoint.keep counts checkpoints")
SHARDED = Message("memory.shard_base = true splits the frozen base model among processes, without DeepSpeed")
NEEDS_QUANTIZED = Message("memory.offload needs a quantized base model; quantize.storage = 'fp8' halves its size")
TITLES = Message("export.title, export.author, export.description and export.license set the text in the LoRA file")
LAYOUTS = Message("export.formats sets the layout of the LoRA file")
OF_THE_RUN = {
    note.template
    for note in (
        *(UPLOAD, RESUMES, LOGGING, OTHER_CACHE, NO_SAMPLER, NO_SWAP, COUNTS_STEPS, COUNTS_CHECKPOINTS, SHARDED),
        *(NEEDS_QUANTIZED, ONE_COMPILE_MODE, TITLES, DESCRIPTION, LAYOUTS, FILE_FORMAT),
    )
}
"""Templates of reasons that are about how a training runs and what it saves, and not about what it learns."""


def is_of_the_run(note: str) -> bool:
    """Return True if a reason, or each of several that are joined, is one of `OF_THE_RUN`."""
    parts = note.parts if isinstance(note, Joined) else (note,)
    return all(isinstance(part, Message) and part.template in OF_THE_RUN for part in parts)


def join(notes: Iterable[str]) -> Joined:
    """Join remarks, each once, without the empty ones."""
    return Joined("; ", dict.fromkeys(filter(None, notes)))
