"""Which module names an entry of a keep-list means. Pure, so that families, config checks and tests can share it."""


def name_matches(name: str, entry: str) -> bool:
    """Whether `entry`, a run of whole dot-separated segments, stands anywhere in the dotted module `name`.

    "norm1.linear" matches "transformer_blocks.3.norm1.linear", but not "...norm1_context.linear". An entry that starts
    with "^" must stand at the start: "^proj_out" is FLUX's last layer and not the `proj_out` of each single block.
    """
    if entry.startswith("^"):
        return f"{name}.".startswith(f"{entry[1:]}.")
    return f".{entry}." in f".{name}."
