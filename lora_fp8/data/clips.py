"""Video clips: what is in a file, which of its frames are trained, and those frames as pictures.

A clip is brought to the model's frame rate by its times, not by its frame numbers: at each moment k / fps the frame is
taken that is nearest in time, so that a recording of 30 (or of a varying number of) frames a second moves as fast as it
did. From what that gives pieces are cut whose lengths are among those that the job allows; nothing is padded.

Frames come upright (phones store a rotation), in the colours of the matrix that the file names. A file that names none
is read as players do: BT.709 from 720 lines up, BT.601 below.

PyAV reads the files; it is an extra, and imported only where there is a clip.
"""

from __future__ import annotations

import bisect
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from PIL import Image

VIDEOS = (".mp4", ".mov", ".mkv", ".webm")
"""Extensions of video files. Animations (GIF, WebP, PNG) are picture files, which `images` reads."""

HDR = {16: "PQ", 18: "HLG"}
"""Transfer characteristics (ITU-T H.273) whose values are not those of a screen picture."""

LINES_OF_709 = 720


class ClipError(ValueError):
    """A clip that cannot be used; the message says why, without the file's name."""


@dataclass(frozen=True)
class Timeline:
    """When each frame of a clip is shown.

    Attributes:
        starts: seconds at which each begins, not decreasing.
        end: second at which the last one ends.
    """

    starts: tuple[Fraction, ...]
    end: Fraction


def can_read_videos() -> bool:
    """Whether PyAV is there."""
    return importlib.util.find_spec("av") is not None


def resampled(timeline: Timeline, fps: float) -> list[int]:
    """The numbers of the frames that are nearest to 0, 1 / fps, 2 / fps, ... seconds after the first one.

    As many as the clip lasts, to the nearest whole; of two that are equally near, the earlier.
    """
    rate, starts = Fraction(fps).limit_denominator(1001), timeline.starts
    first = starts[0]
    found = []
    for k in range(max(1, round((timeline.end - first) * rate))):
        moment = first + k / rate
        after = bisect.bisect_left(starts, moment)
        before = max(0, after - 1)
        near = after < len(starts) and starts[after] - moment < moment - starts[before]
        found.append(after if near or starts[before] > moment else before)
    return found


def pieces(numbers: Sequence[int], lengths: Sequence[int], how: str) -> list[tuple[int, ...]]:
    """Cut resampled frames into what is trained; [] if there are fewer than the least length.

    Args:
        numbers: from `resampled`.
        lengths: numbers of frames that are allowed; the longest that fits is taken.
        how: "head": one piece from the beginning; "middle": one from the middle; "chunks": one after another, as many
            as fit.
    """
    length = max((one for one in lengths if one <= len(numbers)), default=0)
    if not length:
        return []
    spare = len(numbers) - length
    begins = {"head": [0], "middle": [spare // 2], "chunks": range(0, spare + 1, length)}[how]
    if length == 1:  # a clip that is too short for any other length is one picture
        begins = begins[:1]
    return [tuple(numbers[begin : begin + length]) for begin in begins]


# ------------------------------------------------------------------------------------------------------------ decoding


def look(path: Path, max_pixels: int) -> tuple[Timeline, Image.Image]:
    """Decode a video completely (a damaged one shows only then): its times, and its first frame.

    Raises:
        ClipError: it cannot be used.
    """
    starts: list[Fraction] = []
    first, last = None, Fraction(0)
    for frame in _decoded(path):
        if frame.pts is None:
            raise ClipError("has frames without a time; encode it again")
        if first is None:
            if frame.width * frame.height > max_pixels:
                raise ClipError(
                    f"has {frame.width} x {frame.height} = {frame.width * frame.height:,} pixels, more than "
                    f"dataset.max_pixels = {max_pixels:,}"
                )
            if frame.color_trc in HDR:
                raise ClipError(
                    f"is HDR ({HDR[frame.color_trc]}), whose colours are not those of a picture; convert it to SDR"
                )
            first = _picture(frame)
        starts.append(frame.pts * frame.time_base)
        last = (frame.duration or 0) * frame.time_base
    if first is None:
        raise ClipError("has no frames")
    if starts != sorted(starts):
        raise ClipError("has frames that go back in time; encode it again")
    if len(starts) > 1:  # many files are wrong, or say nothing, about how long the last frame stands
        last = max(last, starts[-1] - starts[-2])
    return Timeline(tuple(starts), starts[-1] + last), first


def read(path: Path, numbers: Sequence[int]) -> list[Image.Image]:
    """The frames with these numbers (not decreasing; one may come several times) as upright RGB pictures.

    Raises:
        ClipError: the file has fewer frames, or cannot be decoded.
    """
    found: dict[int, Image.Image] = {}
    for number, frame in enumerate(_decoded(path)):
        if number in numbers:
            found[number] = _picture(frame)
        if number == numbers[-1]:
            return [found[each] for each in numbers]
    raise ClipError(f"has fewer than {numbers[-1] + 1} frames")


def _decoded(path: Path) -> Iterator[Any]:
    """The frames of the first video stream in the order in which they are shown."""
    import av

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ClipError("has no video in it")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            _check_shape_of_pixels(stream.sample_aspect_ratio)
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise ClipError("is damaged; save it again")
                yield frame
    except (av.error.FFmpegError, OSError) as error:
        raise ClipError(f"cannot be decoded: {getattr(error, 'strerror', None) or error}") from error


def _check_shape_of_pixels(ratio: Fraction | None) -> None:
    # Encoders that round sizes write ratios such as 4095:4096.
    if ratio and abs(ratio - 1) > Fraction(1, 100):
        raise ClipError(f"has pixels that are not square ({ratio}); convert it to square ones")


def _picture(frame: Any) -> Image.Image:
    from av.video.reformatter import Colorspace, Interpolation

    named = frame.colorspace not in (0, 2)  # 2 is "not specified"; 0 is RGB
    matrix = None if named or frame.height < LINES_OF_709 else Colorspace.ITU709
    # The same bytes on every machine, as they go into a cache that several may share.
    how = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.BITEXACT
    image = Image.fromarray(frame.to_ndarray(format="rgb24", src_colorspace=matrix, interpolation=how))
    # The display matrix: degrees against the clock, as Pillow counts them.
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
