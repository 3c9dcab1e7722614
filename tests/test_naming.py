"""The table of two namings, and what follows from it: there and back, fused layers, rows in a single file."""

import pytest

from lora_fp8.lora_files import naming

ROWS = (
    ("blocks.#.attn.qkv", "layers.#.attn.to_q layers.#.attn.to_k layers.#.attn.to_v"),
    ("blocks.#.attn.norm.scale", "layers.#.norm_q.weight"),
    ("blocks.#.experts.#.up", "layers.#.moe.#.w1"),
    ("blocks.#.attn", "layers.#.attn"),
    ("blocks.#", "layers.#"),
    ("img_in", "x_embedder"),
)
QKV = tuple(f"layers.12.attn.to_{x}" for x in "qkv")


@pytest.mark.parametrize(
    ("native", "ours"),
    [
        ("blocks.12.attn.qkv", QKV),
        ("blocks.12.attn.qkv.bias", tuple(f"{name}.bias" for name in QKV)),
        ("blocks.3.attn.norm.scale", ("layers.3.norm_q.weight",)),
        ("blocks.3.attn.out.0", ("layers.3.attn.out.0",)),  # by the module above it
        ("blocks.3.mlp.2.weight", ("layers.3.mlp.2.weight",)),
        ("blocks.3.experts.7.up", ("layers.3.moe.7.w1",)),
        ("img_in", ("x_embedder",)),
        ("img_in.weight", ("x_embedder.weight",)),
    ],
)
def test_names_go_there_and_back(native, ours):
    assert naming.from_native(ROWS, native) == ours
    for name in ours:
        assert naming.to_native(ROWS, name) == (native, ours)


def test_a_table_is_its_rows():
    rows = naming.parse_table("""
        img_in = x_embedder
        blocks.# = layers.#
            attn.qkv = attn.to_q attn.to_k attn.to_v
            one = attn1,
            other = attn2
                q = to_q
                norm
            mlp

        first.#, last.#
            norm1, norm2 = norm3
    """)
    assert rows == (
        ("img_in", "x_embedder"),
        ("blocks.#.attn.qkv", "layers.#.attn.to_q layers.#.attn.to_k layers.#.attn.to_v"),
        *(("blocks.#.one.q", "layers.#.attn1.to_q"), ("blocks.#.other.q", "layers.#.attn2.to_q")),
        *(("blocks.#.one.norm", "layers.#.attn1.norm"), ("blocks.#.other.norm", "layers.#.attn2.norm")),
        ("blocks.#.mlp", "layers.#.mlp"),
        *(("first.#.norm1", "first.#.norm1"), ("last.#.norm1", "last.#.norm1")),
        *(("first.#.norm2", "first.#.norm3"), ("last.#.norm2", "last.#.norm3")),
    )


@pytest.mark.parametrize("line", ["a.# = b", "a =", "a b", "a b = c", "= b", "a, = b", "a = b c\n    d = e"])
def test_a_line_that_is_no_row_is_told(line):
    with pytest.raises(ValueError, match="is not 'original = diffusers'|nothing below a fused layer"):
        naming.parse_table(line)


def test_what_no_row_fits():
    for name in ("img_inner", "block.3.mlp", "blocks.x.mlp", "lora.blocks.3.mlp", ""):
        assert naming.from_native(ROWS, name) is None
    assert naming.to_native(ROWS, "layersx.3.mlp") is None
    # A fused row names layers: a norm inside of q belongs to no row of the fused weight.
    assert naming.to_native(ROWS[:1], "layers.3.attn.to_q.norm.weight") is None


def test_rows_of_a_fused_layer_follow_the_members_sizes():
    header = {"net.blocks.0.attn.qkv.weight": (10, 8), "net.blocks.0.attn.qkv.bias": (10,)}
    header |= {"net.img_in.weight": (8, 4), "net.new.weight": (1,), "vae.img_in.weight": (9, 9)}
    sizes = {"to_q": 6, "to_k": 2, "to_v": 2}
    shapes = {f"layers.0.attn.{name}.weight": (rows, 8) for name, rows in sizes.items()}
    shapes |= {f"layers.0.attn.{name}.bias": (rows,) for name, rows in sizes.items()}
    found = {name: (key, rows) for name, key, rows in naming.locate_tensors(ROWS, header, shapes, "net.")}
    for kind in ("weight", "bias"):
        key = f"net.blocks.0.attn.qkv.{kind}"
        assert found.pop(f"layers.0.attn.to_q.{kind}") == (key, (0, 6))
        assert found.pop(f"layers.0.attn.to_k.{kind}") == (key, (6, 8))
        assert found.pop(f"layers.0.attn.to_v.{kind}") == (key, (8, 10))
    # What no row names keeps its name, so that filling the denoiser tells of it; other prefixes are other models.
    assert found == {"x_embedder.weight": ("net.img_in.weight", None), "new.weight": ("net.new.weight", None)}
