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
import contextlib
import importlib.util
import os
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

MOST_FRAMES = 100_000
"""About an hour. What is longer is a film, and would be decoded for as long before anything is said of it."""

NEEDED = "is a video, which PyAV reads; install it: pip install 'lora-fp8[video]'"

# Files of a dataset come from strangers. FFmpeg goes by what is in a file, whatever it is called, and some formats
# (playlists, lists to be joined) are nothing but names of other files.
CONTAINERS = {"format_whitelist": "mov,matroska", "protocol_whitelist": "file"}


class ClipError(ValueError):
    """A clip that cannot be used; the message says why, without the file's name."""


class TooLarge(ClipError):
    """A clip with more pixels than are wanted."""


@dataclass(frozen=True)
class Timeline:
    """When each frame of a clip is shown.

    Attributes:
        starts: seconds at which each begins, not decreasing.
        end: second at which the last one ends.
    """

    starts: tuple[Fraction, ...]
    end: Fraction

    def only_at(self, number: int) -> Fraction | None:
        """The second at which this frame is shown; None if others are shown at it, too."""
        start = self.starts[number]
        around = self.starts[max(0, number - 1) : number + 2]
        return start if around.count(start) == 1 else None


def can_read_videos() -> bool:
    """Whether PyAV is there."""
    return importlib.util.find_spec("av") is not None


def num_resampled(seconds: Fraction, fps: float) -> int:
    """How many frames `resampled` gives of a clip that lasts so long."""
    return max(1, round(seconds * Fraction(fps).limit_denominator(1001)))


def resampled(timeline: Timeline, fps: float) -> list[int]:
    """The numbers of the frames that are nearest to 0, 1 / fps, 2 / fps, ... seconds after the first one.

    As many as the clip lasts, to the nearest whole; of two that are equally near, the earlier.
    """
    rate, starts = Fraction(fps).limit_denominator(1001), timeline.starts
    first = starts[0]
    found = []
    for k in range(num_resampled(timeline.end - first, fps)):
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
    with contextlib.closing(_decoded(path, max_pixels)) as frames:
        for frame in frames:
            if frame.pts is None:
                raise ClipError("has frames without a time; encode it again")
            if first is None:
                if frame.color_trc in HDR:
                    raise ClipError(
                        f"is HDR ({HDR[frame.color_trc]}), whose colours are not those of a picture; convert it to SDR"
                    )
                first = _picture(frame)
            if len(starts) == MOST_FRAMES:
                raise ClipError(f"has more than {MOST_FRAMES:,} frames; cut out what is to be learned")
            starts.append(frame.pts * frame.time_base)
            last = (frame.duration or 0) * frame.time_base
    if first is None:
        raise ClipError("has no frames")
    if starts != sorted(starts):
        raise ClipError("has frames that go back in time; encode it again")
    if len(starts) > 1:  # many files are wrong, or say nothing, about how long the last frame stands
        last = max(last, starts[-1] - starts[-2])
    return Timeline(tuple(starts), starts[-1] + last), first


def poster(path: Path, max_pixels: int) -> Image.Image:
    """The first frame; nothing behind it is decoded.

    Raises:
        ClipError: there is none, or it cannot be decoded.
    """
    with contextlib.closing(_decoded(path, max_pixels)) as frames:
        for frame in frames:
            return _picture(frame)
    raise ClipError("has no frames")


class Reader:
    """The frames of one video. Pieces that are asked for in their order are decoded in one go."""

    def __init__(self, path: Path):
        self.path = path
        self._frames: Iterator[Any] | None = None
        self._next = 0
        self._last: dict[int, Image.Image] = {}  # one alone: pictures are large

    def read(self, numbers: Sequence[int], begins: Fraction | None = None) -> list[Image.Image]:
        """Some frames as upright RGB pictures.

        Args:
            numbers: which, counted from the first; not decreasing, one may come several times.
            begins: the second of the first of them, so that what lies before it need not be decoded; None decodes all.

        Raises:
            ClipError: the file has fewer frames, or cannot be decoded.
        """
        found = {number: picture for number, picture in self._last.items() if number in numbers}
        missing = [number for number in numbers if number not in found]
        try:
            if missing and (self._frames is None or missing[0] < self._next):
                self._open(missing[0], begins)
            while missing and self._next <= missing[-1]:
                frame = next(self._frames, None)
                if frame is None:
                    raise ClipError(f"has fewer than {numbers[-1] + 1} frames")
                if self._next in missing:
                    found[self._next] = _picture(frame)
                self._next += 1
        except ClipError:
            self.close()
            raise
        self._last = {numbers[-1]: found[numbers[-1]]}
        return [found[number] for number in numbers]

    def _open(self, number: int, begins: Fraction | None) -> None:
        """Come before this frame: at it, where its time is found after a keyframe, else at the very first one."""
        self.close()
        if number and begins is not None:
            frames = _decoded(self.path, begins=begins)
            # What is damaged where a keyframe is looked for is told, if it is, by decoding from the beginning.
            with contextlib.suppress(ClipError):
                for frame in frames:
                    time = None if frame.pts is None else frame.pts * frame.time_base
                    if time == begins:
                        self._frames, self._next = _chained(frame, frames), number
                        return
                    if time is None or time > begins:
                        break
            frames.close()
        self._frames, self._next = _decoded(self.path), 0

    def close(self) -> None:
        """Close the file; what is asked for next is looked for anew."""
        if self._frames is not None:
            self._frames.close()
        self._frames, self._last = None, {}


def _chained(first: Any, others: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from others


def read(path: Path, numbers: Sequence[int]) -> list[Image.Image]:
    """As `Reader.read`, once."""
    with contextlib.closing(Reader(path)) as reader:
        return reader.read(numbers)


def _decoded(path: Path, max_pixels: int = 0, begins: Fraction | None = None) -> Iterator[Any]:
    """The frames of the first video stream in the order in which they are shown.

    Args:
        max_pixels: of a frame; 0 takes any.
        begins: second that is wanted; what lies before the keyframe before it is left out, where that changes nothing.
    """
    try:
        import av
    except ModuleNotFoundError:
        raise ClipError(NEEDED) from None

    try:
        try:
            container = av.open(str(path), options=CONTAINERS)
        except av.error.ArgumentError:
            raise ClipError(f"cannot be decoded: is none of {' '.join(VIDEOS)}, whatever its name says") from None
        with container:
            if not container.streams.video:
                raise ClipError("has no video in it")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            stream.codec_context.thread_count = min(4, os.cpu_count() or 1)  # each holds frames of its own
            _check_shape_of_pixels(stream.sample_aspect_ratio)
            _check_size(stream.codec_context, max_pixels)  # before anything of that size is made
            if begins is not None and _can_begin_anywhere(container, stream):
                # A second earlier, as a keyframe may be stored before frames that are shown before it.
                container.seek(int((begins - 1) / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                _check_size(frame, max_pixels)
                if frame.is_corrupt:
                    raise ClipError("is damaged; save it again")
                yield frame
    except (av.error.FFmpegError, OSError) as error:
        raise ClipError(f"cannot be decoded: {getattr(error, 'strerror', None) or error}") from error


def _can_begin_anywhere(container: Any, stream: Any) -> bool:
    """Whether what is decoded from a keyframe on has the pixels that it has when all is decoded.

    In MP4 and MOV a keyframe is one by the file's index. In MKV it is what the writing program took for one, which of
    H.264 and HEVC may be a frame that leans on earlier ones.
    """
    return "mov" in container.format.name or stream.codec_context.name in ("vp8", "vp9", "libdav1d", "av1", "mjpeg")


def _check_size(picture: Any, max_pixels: int) -> None:
    pixels = picture.width * picture.height
    if max_pixels and pixels > max_pixels:
        raise TooLarge(f"has {picture.width} x {picture.height} = {pixels:,} pixels, more than {max_pixels:,}")


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
