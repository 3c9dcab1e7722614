"""The cache: what is encoded again and what is not, and that a file cannot be half right."""

import hashlib
import json
import os
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors
import torch
from PIL import Image

from lora_fp8.data import buckets, cache_cleanup, caption_variants, images
from lora_fp8.data import cache as caching
from lora_fp8.data.cache import Cache
from lora_fp8.errors import RunFailure, UserError
from lora_fp8.families._prompts import Overlong
from lora_fp8.settings import Dataset, Folder

torch.set_num_threads(1)


class Family:
    """Encoders that count what they are asked for and whose results can be computed by hand."""

    name = "fake"
    dtype = torch.float32
    prompts_see_controls = False

    def __init__(self):
        self.images, self.prompts, self.judged, self.loaded = [], [], [], []
        self.identity = {"vae": "vae-1", "text": "text-1"}

    def compute_encoder_identity(self, what):
        return self.identity[what]

    def encode_images(self, pixels_BCHW):
        assert pixels_BCHW.dtype == torch.float32 and pixels_BCHW.min() >= -1 and pixels_BCHW.max() <= 1
        self.images.append(pixels_BCHW)
        return pixels_BCHW[:, :, ::8, ::8] * 2

    def encode_prompts(self, prompts):
        self.prompts += prompts
        return [
            {"embeds": torch.tensor([[float(len(text)), 0.1]]), "mask": torch.tensor([True, False])} for text in prompts
        ]

    def load_vae(self):
        self.loaded.append("vae")

    def encode_in_turn(self, asks):
        self.loaded.append("text")
        yield from enumerate(ask() for ask in asks)

    def free_encoders(self):
        self.loaded.append("free")

    def find_overlong(self, prompts):
        """Reads three words."""
        self.judged += prompts
        cut = [(text, text.split()) for text in prompts if len(text.split()) > 3]
        return [Overlong(text, " ".join(words[3:]), len(words) - 3, 3) for text, words in cut]

    @property
    def calls(self):
        return len(self.images), len(self.prompts)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "set").mkdir()
    for i, size in enumerate([(64, 64), (96, 48), (70, 64)]):
        pixels = np.random.default_rng(i).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "set" / f"{i}.png")
        (tmp_path / "set" / f"{i}.txt").write_text(f"one, two, three, picture {i}", encoding="utf-8")
    return tmp_path


def make(folder, family, **settings):
    """(cache, placed examples, captions), as a new process would make them."""
    dtype = settings.pop("dtype", torch.float32)
    section = Dataset.model_validate({"folders": [{"path": str(folder / "set")}], **settings})
    examples = images.scan(section).require()
    placed = buckets.assign(examples, section, resolution=64, step=8)
    captions = caption_variants.list_dataset_captions(examples, section, seed=0)
    return Cache(folder / "cache", family, section, dtype), placed, captions


def fill(folder, family, **settings):
    cache, placed, captions = make(folder, family, **settings)
    return cache, placed, cache.fill(placed, captions)


def entries(folder):
    return sorted((folder / "cache").glob("*/*/*.safetensors"))


def test_latents_and_conds_are_what_the_encoders_gave(folder):
    family = Family()
    cache, placed, report = fill(folder, family, flip=True)
    assert (report.encoded, report.reused) == (9, 0) and family.calls == (6, 3)
    assert family.loaded == ["vae", "free", "text", "free"]  # never beside each other
    assert report.bytes == sum(path.stat().st_size for path in entries(folder))
    assert all(len(pixels_BCHW) == 1 for pixels_BCHW in family.images)
    for one in placed:
        image = buckets.fit(Image.open(one.example.path), one.placement)
        values_HWC = np.asarray(image).astype(np.float32) / 127.5 - 1
        for flipped in (False, True):
            expected_HWC = (values_HWC[:, ::-1] if flipped else values_HWC)[::8, ::8] * 2
            latents_CHW = cache.read_latents(one, flipped)
            assert latents_CHW.shape == (3, one.placement.bucket_wh[1] // 8, one.placement.bucket_wh[0] // 8)
            np.testing.assert_allclose(latents_CHW.permute(1, 2, 0), expected_HWC, atol=1e-6)
        cond = cache.read_cond(one.example.caption)
        assert cond["embeds"].tolist() == [[len(one.example.caption), pytest.approx(0.1)]]
        assert cond["mask"].tolist() == [True, False]
    # The safetensors library reads an entry, and its header says what it is.
    with safetensors.safe_open(entries(folder)[0], "pt") as file:
        assert json.loads(file.metadata()[caching.METADATA])["key"] == entries(folder)[0].stem


def test_second_fill_encodes_nothing_and_needs_no_encoders(folder):
    fill(folder, Family())
    family = Family()
    family.encode_images = family.encode_prompts = None
    cache, placed, captions = make(folder, family)
    assert not cache.find_missing(placed, captions)
    report = cache.fill(placed, captions)
    assert (report.encoded, report.reused, report.bytes) == (0, 6, 0) and family.loaded == []


def test_texts_that_are_cut_are_told_each_time_also_when_all_is_cached(folder):
    for i, text in enumerate(["one two three", "one two three four", "a b c" + " lost" * 30]):
        (folder / "set" / f"{i}.txt").write_text(text, encoding="utf-8")
    for encoded in (6, 0):
        family = Family()
        cache, placed, captions = make(folder, family)
        report = cache.fill(placed, [*captions, captions[1], ""])
        assert report.encoded == encoded + bool(encoded) and family.judged == [*captions, ""], "each text once"
        assert [(cut.prompt, cut.num_lost) for cut in report.truncated] == [(captions[1], 1), (captions[2], 30)]
        (line,) = report.list_warnings()
        assert (
            line.startswith("2 of 4 captions and prompts exceed the limit of the text encoder, 3 tokens")
            and "up to 30" in line
        )
        assert "'four' of 'one two three four'" in line and "\n" not in line and len(line) < 500
        (line,) = caption_variants.warn_of_truncation(report.truncated, 4, most=1)
        assert line.endswith("'four' of 'one two three four' and 1 more")
    (folder / "set" / "1.txt").write_text("one", encoding="utf-8")
    (folder / "set" / "2.txt").write_text("two", encoding="utf-8")
    _, _, report = fill(folder, Family())
    assert report.truncated == () and report.list_warnings() == []


def test_edited_picture_and_edited_caption_are_encoded_alone(folder):
    fill(folder, Family())
    path = folder / "set" / "1.png"
    Image.open(path).point(lambda value: value ^ 1).save(path)
    family = Family()
    cache, placed, captions = make(folder, family)
    missing = cache.find_missing(placed, captions)
    assert [one.example.relative for one, _ in missing.images] == ["1.png"] and missing.captions == []
    cache.fill(placed, captions)
    assert family.calls == (1, 0)
    (folder / "set" / "2.txt").write_text("another", encoding="utf-8")
    family = Family()
    fill(folder, family)
    assert family.calls == (0, 1) and family.prompts == ["another"]
    # Renaming is no edit.
    (folder / "set" / "0.png").rename(folder / "set" / "9.png")
    (folder / "set" / "0.txt").rename(folder / "set" / "9.txt")
    family = Family()
    fill(folder, family)
    assert family.calls == (0, 0)


CHANGES = [  # settings, identities, calls that they must cause
    ({"background": "#000000"}, {}, (3, 0)),
    ({"background": "#FFFFFF"}, {}, (0, 0)),
    ({"flip": True}, {}, (3, 0)),
    ({"dtype": torch.bfloat16}, {}, (3, 3)),
    ({"buckets": False}, {}, (1, 0)),  # one of three is no square in buckets; the other two keep their cut
    ({"caption_dropout": 0.1}, {}, (0, 1)),
    ({}, {"vae": "vae-2"}, (3, 0)),
    ({}, {"text": "text-2"}, (0, 3)),
]


@pytest.mark.parametrize("case", range(len(CHANGES)))
def test_what_matters_is_in_the_key_and_what_does_not_is_not(folder, case):
    settings, identities, expected = CHANGES[case]
    fill(folder, Family())
    family = Family()
    family.identity |= identities
    fill(folder, family, **settings)
    assert family.calls == expected


def test_preprocessing_version_and_family_are_in_the_key(folder, monkeypatch):
    fill(folder, Family())
    other = Family()
    other.name = "another"
    fill(folder, other)
    assert other.calls == (3, 3)
    monkeypatch.setattr(caching, "PREPROCESSING_VERSION", 10**6)
    family = Family()
    fill(folder, family)
    assert family.calls == (3, 3)


def test_equal_pictures_share_an_entry(folder):
    (folder / "set" / "copy.png").write_bytes((folder / "set" / "0.png").read_bytes())
    (folder / "set" / "copy.txt").write_text("one, two, three, picture 0", encoding="utf-8")
    family = Family()
    fill(folder, family)
    assert family.calls == (3, 3)


def test_dtype_is_kept_and_integers_are_left(folder):
    cache, placed, _ = fill(folder, Family(), dtype=torch.bfloat16)
    assert cache.read_latents(placed[0]).dtype == torch.bfloat16
    cond = cache.read_cond(placed[0].example.caption)
    assert cond["embeds"].dtype == torch.bfloat16 and cond["mask"].dtype == torch.bool


def torn(data):
    return data[: len(data) // 2]


def rotten(data):
    return data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]


def wrong_size(data):
    return b"\xff" * 8 + data[8:]


def without_metadata(data):
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    del header["__metadata__"]
    return (lambda text: len(text).to_bytes(8, "little") + text + data[8 + size :])(json.dumps(header).encode())


@pytest.mark.parametrize("damage", [torn, rotten, wrong_size, without_metadata, lambda data: b"", lambda data: b"[]"])
def test_damaged_entry_is_refused_when_read_and_encoded_again_when_filled(folder, damage):
    cache, placed, _ = fill(folder, Family())
    for kind, path in (
        ("latents", cache.get_entry_path("latents", cache.make_image_key(placed[1], False))),
        ("conds", cache.get_entry_path("conds", cache.make_caption_key(placed[1].example.caption))),
    ):
        before = path.read_bytes()
        path.write_bytes(damage(before))
        with pytest.raises(RunFailure, match="1.png" if kind == "latents" else "picture 1"):
            cache.read_latents(placed[1]) if kind == "latents" else cache.read_cond(placed[1].example.caption)
        family = Family()
        again, placed, report = fill(folder, family)
        assert family.calls == ((1, 0) if kind == "latents" else (0, 1)) and report.reused == 5
        assert path.read_bytes() == before
    again.read_latents(placed[1])


def test_filling_reads_no_contents_and_what_is_rotten_is_encoded_again_after_it_was_read(folder, monkeypatch):
    """Reading a large cache takes minutes. One byte that rotted is met in the training, and once only."""
    cache, placed, _ = fill(folder, Family())
    path = cache.get_entry_path("latents", cache.make_image_key(placed[1], False))
    before = path.read_bytes()
    path.write_bytes(rotten(before))
    with monkeypatch.context() as patched:
        patched.setattr(caching.Path, "read_bytes", lambda path: pytest.fail(f"{path} is read whole"))
        cache, placed, report = fill(folder, Family())
    assert report.reused == 6
    with pytest.raises(RunFailure, match=r"1.png.*resume the run"):
        cache.read_latents(placed[1])
    assert not path.exists()
    assert torch.equal(cache.read_latents(placed[0]), fill(folder, Family())[0].read_latents(placed[0]))
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", [torn, wrong_size, without_metadata, lambda data: data + b"x", lambda data: b"[]"])
def test_an_entry_that_is_not_whole_is_encoded_again_before_it_is_read(folder, damage):
    cache, placed, _ = fill(folder, Family())
    path = cache.get_entry_path("latents", cache.make_image_key(placed[1], False))
    before = path.read_bytes()
    path.write_bytes(damage(before))
    family = Family()
    fill(folder, family)
    assert family.calls == (1, 0) and path.read_bytes() == before


def test_entry_of_another_key_is_not_believed(folder):
    cache, placed, _ = fill(folder, Family())
    first, second = (cache.get_entry_path("latents", cache.make_image_key(one, False)) for one in placed[:2])
    first.write_bytes(second.read_bytes())
    family = Family()
    fill(folder, family)
    assert family.calls == (1, 0)


def test_dying_in_the_middle_of_a_write_leaves_nothing_wrong(folder, monkeypatch):
    def dies(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            fill(folder, Family())
    assert not [path for path in (folder / "cache").rglob("*") if path.is_file()]
    # A process that is killed cannot even remove its temporary file.
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", dies)
        patched.setattr(caching.Path, "unlink", lambda *args, **kwargs: None)
        with pytest.raises(KeyboardInterrupt):
            fill(folder, Family())
    (leftover,) = [path for path in (folder / "cache").rglob("*") if path.is_file()]
    family = Family()
    cache, placed, report = fill(folder, family)
    assert family.calls == (3, 3) and leftover.exists(), "a young file may be another run's"
    os.utime(leftover, (0, time.time() - 2 * caching.TEMPORARY_AGE))
    fill(folder, family)
    assert not leftover.exists() and family.calls == (3, 3) and len(entries(folder)) == 6


def test_an_interrupted_fill_goes_on_where_it_was(folder):
    family = Family()
    cache, placed, captions = make(folder, family)
    with pytest.raises(KeyboardInterrupt):
        cache.fill(placed, captions, log=lambda done, total: (_ for _ in ()).throw(KeyboardInterrupt))
    assert family.calls == (1, 0)
    seen = []
    cache, placed, captions = make(folder, family)
    cache.fill(placed, captions, log=lambda done, total: seen.append((done, total)))
    assert family.calls == (3, 3) and list(dict.fromkeys(seen)) == [(i, 5) for i in range(1, 6)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stop_the_run_and_name_the_file(folder, value):
    family = Family()
    family.encode_images = lambda pixels: torch.full((1, 3, 8, 8), value)
    with pytest.raises(RunFailure, match=r"0\.png.*not finite"):
        fill(folder, family)
    family = Family()
    family.encode_prompts = lambda prompts: [{"embeds": torch.tensor([value])}]
    with pytest.raises(RunFailure, match="picture 0.*embeds"):
        fill(folder, family)
    assert len(entries(folder)) == 3


def test_picture_edited_between_scan_and_fill_is_noticed(folder):
    cache, placed, captions = make(folder, Family())
    path = folder / "set" / "0.png"
    Image.open(path).point(lambda value: value ^ 1).save(path)
    with pytest.raises(RunFailure, match=r"0\.png changed"):
        cache.fill(placed, captions)
    path.unlink()
    with pytest.raises(RunFailure, match=r"0\.png can no longer be read"):
        cache.fill(placed, captions)


def test_reading_what_was_never_filled_is_a_clear_failure(folder):
    cache, placed, _ = make(folder, Family())
    with pytest.raises(RunFailure, match=r"0\.png is no longer in the cache"):
        cache.read_latents(placed[0])


def test_memory_is_bounded_and_least_recently_used_goes_first(folder, monkeypatch):
    filled, placed, _ = fill(folder, Family())
    size = filled.read_latents(placed[0]).nbytes
    cache = Cache(filled.root, Family(), filled.section, ram_bytes=2 * size + size // 2)
    reads = []
    original = Cache._read
    monkeypatch.setattr(Cache, "_read", lambda self, kind, key: reads.append(key) or original(self, kind, key))
    first, second, third = placed[0], placed[1], placed[2]
    for one in (first, second, first, third, first, second):
        cache.read_latents(one)
    keys = [cache.make_image_key(one, False) for one in (first, second, third, second)]
    assert reads == keys, "the first stays, the second made room for the third"
    assert cache._ram_used <= cache.ram_bytes


def test_two_caches_filling_at_once_agree(folder):
    """Another run encodes the same entry between our look and our write."""
    one, placed, captions = make(folder, Family())
    other, _, _ = make(folder, Family())
    one.fill(placed, captions, log=lambda done, total: other.fill(placed, captions))
    family = Family()
    fill(folder, family)
    assert family.calls == (0, 0) and not list((folder / "cache").rglob("*.tmp"))


# ------------------------------------------------------------------------------------------------------------- clean up


def age(folder, days):
    for path in entries(folder):
        os.utime(path, (0, time.time() - days * 86400))


def test_prune_deletes_what_no_run_used_and_nothing_else(folder):
    cache, placed, _ = fill(folder, Family())
    unused = cache.get_entry_path("latents", cache.make_image_key(placed[0], False))
    age(folder, 40)
    path = folder / "set" / "0.png"
    Image.open(path).point(lambda value: value ^ 1).save(path)
    fill(folder, Family())  # another run: uses five of the six again, and makes one
    others = ["latents/notes.txt", "latents/ab/mine.safetensors", "own/ab/" + "ab" * 32 + ".safetensors", "readme"]
    others += ["latents/cd/" + "ab" * 32 + ".safetensors"]  # not in the place of its key
    for name in others:
        (folder / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cache" / name).write_bytes(b"mine")
        os.utime(folder / "cache" / name, (0, 0))
    listed = cache_cleanup.list_entries(folder / "cache")
    assert len(listed) == 7 and listed[0].path == unused and listed[0].bytes == unused.stat().st_size
    assert listed[0].used < listed[1].used - 39 * 86400
    assert cache_cleanup.prune(folder / "cache", 41) == []
    assert [entry.path for entry in cache_cleanup.prune(folder / "cache", 30)] == [unused] and not unused.exists()
    assert all((folder / "cache" / name).exists() for name in others)
    family = Family()
    fill(folder, family)
    assert family.calls == (0, 0), "all that is used is still there"
    with pytest.raises(UserError, match="at least 1"):
        cache_cleanup.prune(folder / "cache", 0.5)
    with pytest.raises(UserError, match="nowhere: there is no such folder"):
        cache_cleanup.prune(folder / "nowhere", 30)


def test_shrinking_deletes_what_was_unused_for_longest_and_nothing_of_the_last_day(folder):
    fill(folder, Family())
    ages = dict(zip(sorted(entries(folder)), (9, 3, 7, 0.9, 5, 0.1), strict=True))
    for path, days in ages.items():
        os.utime(path, (0, time.time() - days * 86400))
    sizes = {path: path.stat().st_size for path in ages}
    total = sum(sizes.values())
    oldest = sorted(ages, key=ages.get, reverse=True)
    (folder / "cache" / "readme").write_bytes(b"mine" * 1000)
    assert cache_cleanup.shrink(folder / "cache", total) == []
    deleted = cache_cleanup.shrink(folder / "cache", total - sizes[oldest[0]] - 1)
    assert [entry.path for entry in deleted] == oldest[:2] and set(entries(folder)) == set(oldest[2:])
    deleted = cache_cleanup.shrink(folder / "cache", 0)
    assert [entry.path for entry in deleted] == oldest[2:4] and set(entries(folder)) == set(oldest[4:])
    assert (folder / "cache" / "readme").exists()


def test_reading_an_entry_is_use_and_is_noted_once_an_hour(folder):
    filled, placed, _ = fill(folder, Family())
    age(folder, 40)
    training = Cache(filled.root, Family(), filled.section)
    training.read_latents(placed[1])
    training.read_cond(placed[2].example.caption)
    old = {entry.path for entry in cache_cleanup.list_entries(filled.root) if entry.used < time.time() - 86400}
    used = {filled.get_entry_path("latents", filled.make_image_key(placed[1], False))}
    used |= {filled.get_entry_path("conds", filled.make_caption_key(placed[2].example.caption))}
    assert len(old) == 4 and not old & used
    age(folder, 1 / 48)
    before = {path: path.stat().st_mtime_ns for path in entries(folder)}
    Cache(filled.root, Family(), filled.section).read_latents(placed[1])
    assert before == {path: path.stat().st_mtime_ns for path in entries(folder)}


def test_a_cache_that_may_only_be_read_can_be_used(folder, monkeypatch):
    filled, placed, _ = fill(folder, Family())
    age(folder, 40)

    def refused(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refused)
    assert torch.equal(
        Cache(filled.root, Family(), filled.section).read_latents(placed[0]), filled.read_latents(placed[0])
    )


def test_a_cache_that_cannot_take_what_is_missing_is_the_users_mistake(folder, tmp_path, no_privilege):
    filled, placed, _ = fill(folder, Family())
    (tmp_path / "file").touch()
    (tmp_path / "theirs").mkdir(mode=0o555)
    filled.root.chmod(0o555)
    Cache(filled.root, Family(), filled.section).fill(placed, [])  # nothing is missing
    for root in (filled.root, tmp_path / "theirs" / "cache", tmp_path / "file"):
        family = Family()
        with pytest.raises(UserError, match=f"dataset.cache_dir = '{root}': the folder cannot be written"):
            Cache(root, family, filled.section).fill(placed, ["a caption that nobody has encoded"])
    filled.root.chmod(0o755)


# ------------------------------------------------------------------------------------------------------------ captions


def tag_section(**settings):
    return Dataset(shuffle_tags=True, **settings)


def test_variants_keep_the_first_tags_and_all_tags():
    section = tag_section(keep_tokens=2, caption_variants=6)
    caption = "sks, cat,  sitting , red sofa,, indoors"
    tags = ["sks", "cat", "sitting", "red sofa", "indoors"]
    variants = [caption_variants.draw_caption_variant(caption, v, section, 5) for v in range(6)]
    for text in variants:
        assert text.split(", ")[:2] == tags[:2] and sorted(text.split(", ")) == sorted(tags)
    assert len(set(variants)) > 1
    assert variants == [caption_variants.draw_caption_variant(caption, v, section, 5) for v in range(6)]
    assert variants != [caption_variants.draw_caption_variant(caption, v, section, 6) for v in range(6)]
    assert (
        caption_variants.draw_caption_variant("a b c", 0, tag_section(tag_separator=" ", keep_tokens=3), 0) == "a b c"
    )
    assert caption_variants.draw_caption_variant("", 0, section, 0) == ""


def test_tags_are_left_out_and_words_drawn_as_often_as_asked():
    folders = [Folder(path="x", trigger="sks"), Folder(path="y")]
    section = Dataset(folders=folders, trigger="zibo", tag_dropout=0.3, keep_tokens=1, wildcards=True)
    caption = "girl, a sks hat, {red|blue|}sofa, {open} door, zibonic, zibo, sky"
    words = {"red": 0, "blue": 0, "": 0}
    seen = Counter()
    for variant in range(3000):
        text = caption_variants.draw_caption_variant(caption, variant, section, 5)
        tags = text.split(", ")
        sofa = [tag for tag in tags if tag.endswith("sofa")]
        seen.update("sofa" if tag in sofa else tag for tag in tags)
        words.update({tag.removesuffix("sofa"): words[tag.removesuffix("sofa")] + 1 for tag in sofa})
        order = ["girl", "a sks hat", *(sofa or ["sofa"]), "{open} door", "zibonic", "zibo", "sky"]
        assert tags == [tag for tag in order if tag in tags]  # nothing is moved
    assert seen["girl"] == seen["a sks hat"] == seen["zibo"] == 3000  # the first, and those with a trigger word
    for tag in ("sofa", "{open} door", "zibonic", "sky"):
        assert abs(seen[tag] / 3000 - 0.7) < 5 * (0.3 * 0.7 / 3000) ** 0.5, tag
    assert all(abs(count / seen["sofa"] - 1 / 3) < 5 * (2 / 9 / seen["sofa"]) ** 0.5 for count in words.values())
    sentence = "A house,by the {lake|sea} , at night"
    plain = section.model_copy(update={"tag_dropout": 0.0})
    found = {caption_variants.draw_caption_variant(sentence, v, plain, 0) for v in range(8)}
    assert found == {sentence.replace("{lake|sea}", word) for word in ("lake", "sea")}  # a sentence is not taken apart
    held_out = caption_variants.draw_caption_variant(sentence, 0, caption_variants.disable_caption_variants(section), 0)
    assert held_out in found and held_out in caption_variants.list_dataset_captions(
        [SimpleNamespace(caption=sentence)], section.model_copy(update={"tag_dropout": 0.9}), 0
    )


def test_a_line_of_a_caption_is_drawn_each_time(tmp_path):
    """All lines equally often, each with what the folder adds; validation always sees the same one."""
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("red\n\n blue \ngreen, sks\n", encoding="utf-8")
    folder = Folder(path=str(tmp_path), prefix="a", trigger="sks")
    lines = ["sks, a red", "sks, a blue", "a green, sks"]
    for mode, whole in (("join", "a red blue green, sks"), ("first", "sks, a red"), ("one", "\n".join(lines))):
        section = Dataset(folders=[folder], caption_lines=mode, caption_variants=64)
        (example,) = images.scan(section).examples
        assert example.caption == whole
        texts = caption_variants.list_dataset_captions([example], section, 3)
        assert sorted(texts) == (sorted(lines) if mode == "one" else [whole])
    counts = Counter(caption_variants.draw_caption_variant(whole, v, section, 3) for v in range(3000))
    assert counts.keys() == set(lines)
    assert all(abs(count / 3000 - 1 / 3) < 5 * (2 / 9 / 3000) ** 0.5 for count in counts.values())
    plain = caption_variants.disable_caption_variants(section)
    assert caption_variants.draw_caption_variant(whole, 0, plain, 3) in lines


@pytest.mark.parametrize(
    ("caption", "front", "middle", "end"),
    [
        ("sks, girl ||| hat, red, sky", "sks, girl", "hat, red, sky", ""),
        ("sks ||| hat, red, sky ||| best, new", "sks", "hat, red, sky", "best, new"),
        ("||| hat, red, sky|||best", "", "hat, red, sky", "best"),
        ("sks ||| hat, red, sky ||| best ||| new", "sks", "hat, red, sky", "best, new"),
        ("sks, hat, red, sky", "sks", "hat, red, sky", ""),  # without the mark, keep_tokens counts
    ],
)
def test_tags_outside_the_marks_stay_where_they_are(caption, front, middle, end):
    """The rule of sd-scripts' keep_tokens_separator: fixed ||| shuffled ||| fixed."""
    section = tag_section(keep_separator="|||", keep_tokens=1, caption_variants=8)
    head, own, tail = ([tag for tag in part.split(", ") if tag] for part in (front, middle, end))
    variants = [caption_variants.draw_caption_variant(caption, v, section, 5).split(", ") for v in range(8)]
    for tags in variants:
        assert tags[: len(head)] == head and tags[len(tags) - len(tail) :] == tail
        assert sorted(tags[len(head) : len(tags) - len(tail)]) == sorted(own)
    assert len(set(map(tuple, variants))) > 1
    dropping = section.model_copy(update={"shuffle_tags": False, "tag_dropout": 0.9})
    kept = [caption_variants.draw_caption_variant(caption, v, dropping, 5).split(", ") for v in range(8)]
    assert all(set(head + tail) <= set(tags) for tags in kept) and min(map(len, kept)) < len(variants[0])
    # Validation, and a section that shuffles nothing, keep the order; the mark itself is never trained.
    whole = ", ".join(head + own + tail)
    for plain in (
        caption_variants.disable_caption_variants(section),
        section.model_copy(update={"shuffle_tags": False}),
    ):
        assert caption_variants.draw_caption_variant(caption, 0, plain, 5) == whole
    texts = caption_variants.list_dataset_captions([SimpleNamespace(caption=caption)], section, 5)
    assert not any("|" in text for text in texts) and whole in texts
    assert caption_variants.draw_caption_variant(caption, 0, Dataset(), 5) == caption  # without the setting it is text


def test_all_orders_are_equally_likely():
    section = tag_section(keep_tokens=0)
    counts = {}
    for seed in range(1200):
        text = caption_variants.draw_caption_variant("a, b, c", 0, section, seed)
        counts[text] = counts.get(text, 0) + 1
    assert len(counts) == 6 and all(140 < count < 260 for count in counts.values()), counts


def test_dataset_captions(folder):
    section = Dataset(folders=[Folder(path=str(folder / "set"))])
    examples = images.scan(section).examples
    plain = [f"one, two, three, picture {i}" for i in range(3)]
    assert caption_variants.list_dataset_captions(examples + examples, section, 0) == plain
    section = section.model_copy(update={"shuffle_tags": True, "caption_variants": 4, "caption_dropout": 0.5})
    texts = caption_variants.list_dataset_captions(examples, section, 0)
    assert len(texts) == len(set(texts)) and set(plain) <= set(texts) and "" in texts
    assert {caption_variants.draw_caption_variant(plain[1], v, section, 0) for v in range(4)} <= set(texts)


def test_permutation_is_the_one_written_down_in_the_documentation():
    """Pinned: a resumed or repeated run on a later Python must draw the same. Judged by its definition."""
    import random

    from lora_fp8.data import derive_seed, make_permutation

    digest = hashlib.sha256(b"items|0|1").digest()
    assert derive_seed("items", 0, 1) == int.from_bytes(digest[:8], "big") // 2 < 2**63
    rng = random.Random(derive_seed("items", 0, 1))
    draws = [rng.random() for _ in range(7)]
    assert [draws[i] for i in make_permutation(7, "items", 0, 1)] == sorted(draws)
