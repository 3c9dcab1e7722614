"""The facts that a family states, as class attributes with types; `README.md` says where to find each.

Those without a value have no default. Importing this module does not import torch, nor does importing a family file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import Template
from ..lora_files import naming
from ._clip import CHUNK_TOKENS
from ._files import Absentees, Header

if TYPE_CHECKING:
    import torch

    from .. import settings
    from ._weights import WeightFile
    from .sources import BaseDescription


@dataclass(frozen=True)
class TextEncoder:
    """A CLIP text encoder in which LoRAs can be trained, with the sizes of the released model.

    Attributes:
        kohya: prefix of its layers' names in kohya's naming.
        comfy: its name in ComfyUI's naming; "" if the family has no such layout.
        width, hidden: width of the embeddings, and of the hidden layer of its MLPs.
        num_layers: number of its transformer layers.
        unread: number of last layers without an adapter, because their output is not part of the conditioning.
    """

    kohya: str
    comfy: str
    width: int
    hidden: int
    num_layers: int
    unread: int = 0


class Facts:
    """What a family states about its architecture, and what a family object knows about the given model."""

    # -- names ---------------------------------------------------------------------------------------------------------
    name: ClassVar[str]
    title: ClassVar[str]
    example_base: ClassVar[str]
    """The `model.path` that `lora-fp8 new` writes: the released model that most people train on."""
    pipeline_class: ClassVar[str]
    """Class name of the pipeline in diffusers."""
    denoiser_class: ClassVar[str]
    denoiser_name: ClassVar[str] = "transformer"
    """"unet" or "transformer": the subfolder, the pipeline's attribute, and the key prefix in diffusers' LoRA files."""
    index_name: ClassVar[str] = "model_index.json"
    """Name of the file that says which pipeline a folder is made for."""

    # -- prompts -------------------------------------------------------------------------------------------------------
    text_millions: ClassVar[tuple[int, int]]
    """Millions of parameters of the released model's largest text encoder, and of these in embeddings, by its model
    card: scripts/measure_memory.py counts their bytes."""
    text_parts: ClassVar[dict[str, str]]
    """Subfolder -> class, for the tokenizers and for the models that turn their tokens into conditioning. Subfolders
    are named as in the pipeline; classes are from transformers or diffusers, or given by their full dotted name."""
    text_widths: ClassVar[dict[str, str]]
    """Entry of the denoiser's config (or of another part's, as "part.entry") -> the sum of the text encoders' entries
    that it must equal, such as "text_encoder.hidden_size + 6 * unet.addition_time_embed_dim"."""
    text_shapes: ClassVar[dict[str, tuple[int | str, ...]]]
    """Name -> shape of what `encode_prompts` returns for the longest prompt. A word is an entry of the denoiser's
    config.json ("entry.1": its second item) or "tokens", which is `longest_prompt`; "a + 77" and "a - 6 * b" are
    sums."""
    text_answers: ClassVar[tuple[str, ...]] = ("prompt_embeds",)
    """Names in `Cond` for the results of the pipeline's `encode_prompt`, in order; later results may be left out. "":
    not kept; "mask": marks the prompt's own tokens, and only these are kept of `prompt_embeds`."""
    text_options: ClassVar[dict[str, Any]] = {}
    """Arguments that `encode_prompt` needs besides the usual ones."""
    text_arguments: ClassVar[dict[str, str]] = {}
    """Name in `Cond` -> argument of the pipeline's call, where the two differ; "mask" names the argument of a mask.
    Without it, the pipeline of a family with `prompts_vary` takes prompts as a list."""
    prompt_tokens: ClassVar[int] = 0
    """Tokens to which a prompt is padded or cut, its template included (the pipelines' `max_sequence_length`), unless
    those tokenizers have a lower limit. 0: the pipeline leaves it to the tokenizers."""
    judge_length_by: ClassVar[tuple[str, ...]] = ("tokenizer",)
    """The tokenizers whose limit decides what is cut off a prompt."""
    prompts_vary: ClassVar[bool] = False
    """True if the length of `prompt_embeds` follows the prompt. In a batch they are padded, and get a mask."""
    padded_in_front: ClassVar[bool] = False
    """True if shorter prompts of a batch are padded in front, False if behind."""
    chat: ClassVar[tuple[dict[str, Any], ...]] = ()
    """Messages into which the pipeline puts a prompt (here a NUL) for its tokenizer's chat template; () for none."""
    end_counts: ClassVar[bool] = False
    """True if the template's text after the prompt is always read, because the pipeline refuses longer prompts; False
    if that text is cut off first."""
    uses_negative: ClassVar[bool] = True
    """True if the pipeline uses a negative prompt at its usual settings."""
    long_captions: ClassVar[bool] = False
    """True if captions may be longer than its CLIPs read, and are encoded in chunks (`_clip`)."""
    skips_layers: ClassVar[bool] = False
    """True if fine-tunes of the model are trained on an earlier layer of its CLIP (`model.clip_skip`). SDXL always
    reads the layer before the last, SD 2's encoder comes without its last layer, and both are trained like that."""
    trained_text: ClassVar[dict[str, TextEncoder]] = {}
    """The text encoders that can be trained, by their names in the pipeline: those whose LoRA the pipeline loads."""
    checkpoint_text: ClassVar[dict[str, str | tuple[str, ...]]] = {}
    """Text encoder -> prefix, or possible prefixes, of its keys in single files that contain it."""
    size_cond: ClassVar[str] = ""
    """Name in `Cond` of six numbers about each image, if the denoiser takes them: see `make_image_conditioning`."""
    exact_cond: ClassVar[tuple[str, ...]] = ()
    """Names of the conditioning tensors that stay in float32."""
    captions: ClassVar[str] = "sentences"
    """How images for this model are captioned: "tags" (separated by commas), "sentences", or "instructions" (editing
    models). Recipes shuffle tags only."""

    # -- the denoiser and its training ---------------------------------------------------------------------------------
    noise_argument: ClassVar[str] = "hidden_states"
    """Argument of the denoiser for the noisy latents."""
    denoiser_reads: ClassVar[Mapping[str, str | tuple[str, ...]]] = {"encoder_hidden_states": "prompt_embeds"}
    """Argument of the denoiser -> name in `Cond`; a tuple of names stands for a dict of these. Enough to call a
    denoiser that takes these, its noise and `timestep`; others override `make_inputs`."""
    timestep_unit: ClassVar[int] = 1
    """The `timestep` that stands for sigma = 1: 1 if the denoiser multiplies by 1000 itself, else 1000."""
    objective: ClassVar[Literal["Diffusion", "FlowMatching"]] = "FlowMatching"
    """The kind of noising process, which `objectives` implements; see `get_objective_type`."""
    train_shift: ClassVar[float | None] = None
    """The shift that objective.shift = "auto" stands for; None: the scheduler's. Set it where training needs another
    shift than sampling: a sampler's shift spends few steps where they matter, but on top of the logit-normal density it
    can leave next to no training at low noise levels. State the source in a comment."""
    towards_image: ClassVar[bool] = False
    """True if the denoiser predicts the velocity towards the image, the negative of what the scheduler expects."""
    is_recordable: ClassVar[bool] = True
    """False if a call of the denoiser reads values or makes tensors on the CPU, which no CUDA graph can hold."""
    embeds_guidance: ClassVar[bool] = False
    """True if models of this architecture may take the guidance scale as an input (guidance-distilled models do)."""
    computed: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Modules of the denoiser that compute tensors when they are created, which no file stores -> names of their
    constructor's arguments: attributes of the module, or entries of the denoiser's config."""

    # -- latents and images --------------------------------------------------------------------------------------------
    vae_class: ClassVar[str] = "AutoencoderKL"
    vae_marks: ClassVar[dict[str, Any]] = {"latents_mean": None, "latents_std": None}
    """Entries of the VAE's config.json that `encode_images` relies on; by default, no normalization per channel."""
    other_vaes: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    """Models whose VAE has the same class and config -> the first means in its batch norm; such a VAE is refused."""
    bucket_multiple: ClassVar[int]
    """Image sides are multiples of this many pixels."""
    patch: ClassVar[int] = 1
    """Side of the square of latents that is one token of the denoiser."""
    latents_as: ClassVar[str] = "BCHW"
    """How the pipeline lays out latents: "BCHW"; "BCFHW", a clip of one frame; or "BSD", a sequence of patches. Patches
    go row by row, in clips frame by frame, and the values of a patch lie together in each channel."""
    patch_channels: ClassVar[str] = "C22"
    """Order of the channels if 2 x 2 of the VAE's latents become one of the denoiser's, normalized by a batch norm:
    "C22" keeps the four values of a channel together, "22C" the channels of each of the four."""
    batch_norm_eps: ClassVar[float | None] = None
    """Epsilon of that batch norm, if it differs from the VAE's config; None: the config's."""
    native_resolution: ClassVar[int]
    """Resolution at which the released model was trained, in pixels."""
    bucket_step: ClassVar[int] = 64
    """Default distance between bucket sizes, in pixels; large enough that images share buckets."""
    clips: ClassVar[tuple[int, int]] = (0, 0)
    """(frames of a clip per frame of its latents, frames per second). The first frame of a clip has a latent frame of
    its own. (0, 0): the model generates images only."""

    # -- control images ------------------------------------------------------------------------------------------------
    controls: ClassVar[tuple[int, int]] = (0, 0)
    """The minimum and maximum number of control images that the denoiser takes beside the noise."""
    prompts_see_controls: ClassVar[bool] = False
    """True if the text encoders take the control images too. Then `encode_prompts` receives them, and the cache holds
    one conditioning for each pair of image and caption."""

    # -- layers --------------------------------------------------------------------------------------------------------
    adapter_targets: ClassVar[tuple[str, ...]]
    """Suffixes (whole dotted segments) of the names of the layers that get an adapter."""
    adapter_exclude: ClassVar[tuple[str, ...]] = ()
    """Name parts (see `precision.names`) of layers that match `adapter_targets` but get no adapter."""
    keep_precise: ClassVar[tuple[str, ...]]
    """Name parts (see `precision.names`) of the layers that keep the model's dtype: they are small, or sensitive."""
    modulation: ClassVar[tuple[str, ...]] = ()
    """Name parts of the layers that scale and shift the blocks' norms: they see one row per image, and no tokens."""
    further_layers: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Linear layers that get no adapter by default but may, as a user would name them in adapter.targets. "blocks": the
    others in the blocks, such as those of `modulation`; "refiners": those in blocks of `adapter_exclude`; "outside":
    those outside of all blocks. Other trainers adapt some of them: see importing/target_modules.py."""
    no_adapter: ClassVar[tuple[str, ...]] = ()
    """Layers that never get an adapter, even if a user asks; "blocks.-1" as above. Either nothing reads their output,
    so that they would never learn, or a LoRA on them would mean something else in the original naming."""

    # -- files of the base model ---------------------------------------------------------------------------------------
    config_marks: ClassVar[dict[str, Any]] = {}
    """Entries of the denoiser's config.json that distinguish this architecture from others of the same class."""
    single_file: ClassVar[dict[str, Any]] = {}
    """How the headers of this architecture's single files are recognized, by names without their prefix. "has": tensors
    that exist; "lacks": prefixes that no tensor has; "shapes": name -> shape, where None stands for any side;
    "in_is_out": the first layer takes as many channels as the last one returns, which is not so for models with more
    inputs (inpainting, image to video). Test the structure, not the size: miniatures must pass.
    Of two architectures of one structure, one states the side that tells them apart, such as latent channels."""
    native_layers: ClassVar[tuple[naming.Row, ...]] = ()
    """The denoiser's layer names in the original code and in diffusers: see `naming`."""
    swapped_halves: ClassVar[tuple[str, ...]] = ()
    """Layers whose rows are (shift, scale) in the original code and (scale, shift) in diffusers. "blocks.-1" is the
    last block."""
    beside_denoiser: ClassVar[tuple[str, ...]] = ()
    """Modules and tensors of single files whose names look like the denoiser's but are not part of it."""
    reference_config: ClassVar[dict[str, Any]] = {}
    """The released model's denoiser config, for single files whose components folder has none."""
    sizes_from: ClassVar[dict[str, str]] = {}
    """Entry of the denoiser's config -> the tensor of a single file that states it, in the form of `_files.read_sizes`.
    List all in which released models differ, and the width of the prompt embeddings."""
    published: ClassVar[dict[str, dict[str, Any]]] = {}
    """Part -> config of the released VAE, text encoders and "scheduler", and "index" for options in model_index.json:
    what single files are completed with. Without it, they are fetched from `example_base`."""
    tokenizers_from: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Tokenizer -> folders on the hub, as "owner/name/folder", that have the same one and need no licence accepted."""
    file_names: ClassVar[dict[str, str]] = {}
    """Part -> pattern in the usual name of its file, which decides between files that have equal headers."""
    same_tensors_as: ClassVar[str] = ""
    """The family whose single files have the same tensors, so that only the file's name tells the two apart."""
    caveats_by_name: ClassVar[dict[str, Template]] = {}
    """Pattern in a single file's name -> what the file, {name}, then is, where its tensors do not tell: see
    `list_caveats`."""
    training_adapter: ClassVar[str] = ""
    """page of a training adapter for the distilled model, see `settings.Model.training_adapter`; "" if none is known"""
    distilled_advice: ClassVar[str]
    """What users must know before they train on a model for which `is_distilled` is true."""
    distilled_name: ClassVar[str] = ""
    """Pattern in the name of a distilled model's file, folder or hub repository, where nothing else tells. Beside a
    `distilled_mark`: in a single file's name, which has no "turbo" or "distill" in it."""
    distilled_mark: ClassVar[tuple[str, str, Any] | None] = None
    """("index" or "scheduler", entry, value): the entry of model_index.json or of scheduler_config.json that tells a
    distilled model. The name, where it says something, comes first (`is_distilled_by_name`)."""

    # -- LoRA files ----------------------------------------------------------------------------------------------------
    modelspec_architecture: ClassVar[str]
    kohya_base_version: ClassVar[str]
    kohya_module: ClassVar[str] = "networks.lora"
    """The module with which sd-scripts or musubi-tuner train this architecture, written as `ss_network_module`.
    Programs display it and recognize LoRA files by it. If neither trains the architecture, it is sd-scripts' plain
    module."""
    kohya_naming: ClassVar[str]
    """Key in `layer_names.NAMINGS` of the rule that the kohya layout follows."""
    layouts: ClassVar[tuple[str, ...]] = ("kohya", "diffusers")
    """Key layouts in which LoRA files of this architecture are written, the most widely read first."""
    layouts_of_diffusers: ClassVar[tuple[str, ...]] = ("diffusers", "comfy", "kohya")
    """Those of `layouts` that diffusers' pipeline loads completely; a test compares it with what the pipeline does."""
    auto_layouts: ClassVar[tuple[str, ...]] = ()
    """Layouts that export.formats = ["auto"] writes. Empty: the first of `layouts`, plus "diffusers" if diffusers does
    not load that one."""
    converter_width: ClassVar[int] = 0
    """Width of the released model, if diffusers' converter of other layouts is hard-coded to it; 0 if not."""
    converter_blocks: ClassVar[tuple[str, ...]] = ()
    """Layers that every block must have, and no other layer, for diffusers to convert the kohya layout; () for any."""
    converter_mark: ClassVar[str] = ""
    """Shell pattern of layers, one of which must be adapted for diffusers to recognise ComfyUI's names; "" for any."""
    lokr_of_diffusers: ClassVar[bool] = False
    """True if diffusers' pipeline loads LoKr files under its own layer names; for most architectures it does not."""
    split_names_in_comfy: ClassVar[bool] = False
    """True if ComfyUI also knows the layers by diffusers' names, each as its rows of the fused layer."""

    # -- previews ---------------------------------------------------------------------------------------------------
    default_guidance: ClassVar[float]
    """Default guidance scale of previews."""
    guidance_argument: ClassVar[str] = "guidance_scale"
    """The pipeline's argument for the guidance scale."""
    plain_guidance: ClassVar[float] = 1.0
    """The pipeline's value for no guidance: 0 if it adds that many times the difference to the conditional
    prediction."""
    call_options: ClassVar[dict[str, Any]] = {}
    """Keyword arguments that every call of the pipeline needs, such as one frame if it generates videos."""
    pipeline_options: ClassVar[dict[str, Any]] = {}
    """Keyword arguments of the pipeline's constructor."""

    # -- the given model -----------------------------------------------------------------------------------------------
    device: torch.device
    dtype: torch.dtype
    text_storage: str
    num_chunks: int = 1
    """Chunks of a caption, of 75 tokens each; 1 without `long_captions`."""
    clip_skip: int = 1
    """The layer of CLIP that is read, counted from the last, which is 1; always 1 without `skips_layers`."""
    prompt_weights: bool = False
    """True if captions and prompts may have weights; see `_prompt_weights`."""
    given_prediction: str
    given_zero_snr: bool
    folder: Path
    checkpoint: Path | None
    absent: Absentees
    """The weights that are not on this machine yet, by the place where they will be; see `_files.Absent`."""
    bases: tuple[BaseDescription, ...]
    """The descriptions of what is on a hub: the base model, and the repository in `model.components`."""
    warnings: list[str]
    """Notes on the files; the trainer shows them."""
    vae: Any  # diffusers types neither its VAEs nor its pipelines; None until it is loaded
    _text_pipeline: Any  # as the VAE
    _tokenizers: dict[str, Any]
    _file: WeightFile | None
    _part_files: dict[str, WeightFile]
    _header: Header

    def read_text_settings(self, model: settings.Model) -> None:
        """Take those of the job's `[model]` settings that say how captions are encoded, as far as the family has them.

        Those that it does not have are reported as unused (`config.find_unused_settings`).
        """
        self.text_storage = model.text_storage
        self.num_chunks = model.caption_tokens // CHUNK_TOKENS if self.long_captions else 1
        self.clip_skip = model.clip_skip if self.skips_layers else 1
        self.prompt_weights = model.prompt_weights and self.long_captions
