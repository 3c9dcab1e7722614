"""Video clips: read when each frame of a file is shown, choose the frames to train, and decode them as images.

A clip is resampled to the model's frame rate by time, not by frame number: for each moment k / fps the frame nearest in
time is taken, so that a recording at 30 (or at a varying number of) frames per second keeps its speed. The resampled
frames are cut into pieces whose lengths are among those that the job allows; nothing is padded.

Frames come upright (phones store a rotation), in the colours of the matrix that the file names. If it names none, the
convention of players applies: BT.709 from 720 lines up, BT.601 below.

PyAV reads the files; it is an optional dependency, imported only when there is a clip.
"""

from __future__ import annotations

import bisect
import contextlib
import importlib.util
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from PIL import Image

from ..common.reading import open_regular
from ..errors import Message, Template, reason

VIDEOS = (".mp4", ".mov", ".mkv", ".webm")
"""Extensions of video files. Animations (GIF, WebP, PNG) are image files, which `images` reads."""

HDR = {16: "PQ", 18: "HLG"}
"""HDR transfer characteristics (ITU-T H.273): the values are not those of an image for screens."""

LINES_OF_709 = 720

MOST_FRAMES = 100_000
"""About an hour. A longer video is a film, and decoding it would take as long before anything is reported."""

NEEDED = Message("this is a video, which needs PyAV; install it: pip install 'lora-fp8[video]'")
CANNOT_BE_READ = Template("the file cannot be read: {why}")
CANNOT_BE_DECODED = Template("the file cannot be decoded: {why}")
NO_FRAMES = Message("the video has no frames")

# Datasets come from strangers. FFmpeg goes by the contents of a file, whatever its name, and some formats (playlists,
# concat lists) only name other files to read.
CONTAINERS = {"format_whitelist": "mov,matroska", "protocol_whitelist": "file"}


class ClipError(ValueError):
    """A clip that cannot be used; the message says why, without the file's name."""


class TooLarge(ClipError):
    """A clip of more pixels than are allowed, and its size."""

    def __init__(self, width: int, height: int, most: int):
        """Say what is wrong without naming a setting: callers other than a scan have limits of their own."""
        self.size = width, height
        pixels = f"{width * height:,}"
        line = Message(
            "the video has {width} x {height} = {pixels} pixels; the limit is {most}",
            width=width,
            height=height,
            pixels=pixels,
            most=f"{most:,}",
        )
        super().__init__(line)


def describe_too_large(width: int, height: int, most: int) -> Message:
    """Return what is wrong with an image or clip of more pixels than `dataset.max_pixels`."""
    return Message(
        "the file has {width} x {height} = {pixels} pixels, more than dataset.max_pixels = {most}",
        width=width,
        height=height,
        pixels=f"{width * height:,}",
        most=f"{most:,}",
    )


@dataclass(frozen=True)
class Timeline:
    """When each frame of a clip is shown.

    Attributes:
        starts: seconds at which each frame begins, not decreasing.
        end: second at which the last frame ends.
    """

    starts: tuple[Fraction, ...]
    end: Fraction

    def find_unique_start(self, number: int) -> Fraction | None:
        """Return the second at which this frame is shown; None if another frame has the same time."""
        start = self.starts[number]
        around = self.starts[max(0, number - 1) : number + 2]
        return start if around.count(start) == 1 else None


def describe_hdr(transfer: int) -> Message:
    """Return what is wrong with an image or clip of one of the transfer characteristics in `HDR`."""
    return Message("the file is HDR ({kind}), which is not supported; convert it to SDR", kind=HDR[transfer])


def can_read_videos() -> bool:
    """Return True if PyAV is installed."""
    return importlib.util.find_spec("av") is not None


def count_resampled(seconds: Fraction, fps: float) -> int:
    """Return how many frames `resample` gives for a clip of this length."""
    return max(1, round(seconds * Fraction(fps).limit_denominator(1001)))


def resample(timeline: Timeline, fps: float) -> list[int]:
    """Return the numbers of the frames nearest to 0, 1 / fps, 2 / fps, ... seconds after the first frame.

    Their number is the clip's length times fps, rounded. Of two frames that are equally near, the earlier is taken.
    """
    rate, starts = Fraction(fps).limit_denominator(1001), timeline.starts
    first = starts[0]
    nearest = []
    for k in range(count_resampled(timeline.end - first, fps)):
        moment = first + k / rate
        after = bisect.bisect_left(starts, moment)
        before = max(0, after - 1)
        near = after < len(starts) and starts[after] - moment < moment - starts[before]
        nearest.append(after if near or starts[before] > moment else before)
    return nearest


def cut_pieces(numbers: Sequence[int], lengths: Sequence[int], how: str) -> list[tuple[int, ...]]:
    """Cut resampled frames into the pieces that are trained; [] if there are fewer frames than the smallest length.

    Args:
        numbers: frame numbers from `resample`.
        lengths: allowed lengths of a piece, in frames; the longest that fits is taken.
        how: "head": one piece from the start; "middle": one from the middle; "chunks": as many as fit, one after
            another.
    """
    length = max((fitting for fitting in lengths if fitting <= len(numbers)), default=0)
    if not length:
        return []
    spare = len(numbers) - length
    begins = {"head": [0], "middle": [spare // 2], "chunks": range(0, spare + 1, length)}[how]
    if length == 1:  # a clip too short for any other length is a single image
        begins = begins[:1]
    return [tuple(numbers[begin : begin + length]) for begin in begins]


# ------------------------------------------------------------------------------------------------------------ decoding


def decode_video(path: Path, max_pixels: int) -> tuple[Timeline, Image.Image]:
    """Decode a video completely, as a damaged one is noticed only then.

    Returns:
        When its frames are shown, and the first frame.

    Raises:
        ClipError: the video cannot be used.
    """
    starts: list[Fraction] = []
    first, last = None, Fraction(0)
    with contextlib.closing(_decode_frames(path, max_pixels)) as frames:
        for frame in frames:
            if frame.pts is None:
                raise ClipError(Message("the video has frames without a timestamp; encode it again"))
            if first is None:
                if frame.color_trc in HDR:
                    raise ClipError(describe_hdr(frame.color_trc))
                first = _convert_frame(frame)
            if len(starts) == MOST_FRAMES:
                raise ClipError(
                    Message(
                        "the video has more than {count} frames; cut out the part to be trained",
                        count=f"{MOST_FRAMES:,}",
                    )
                )
            starts.append(frame.pts * frame.time_base)
            last = (frame.duration or 0) * frame.time_base
    if first is None:
        raise ClipError(NO_FRAMES)
    if starts != sorted(starts):
        raise ClipError(Message("the video has frames with timestamps that go backwards; encode it again"))
    if len(starts) > 1:  # many files store no duration for the last frame, or a wrong one
        last = max(last, starts[-1] - starts[-2])
    return Timeline(tuple(starts), starts[-1] + last), first


def read_first_frame(path: Path, max_pixels: int) -> Image.Image:
    """Decode only the first frame.

    Raises:
        ClipError: the video has no frames, or cannot be decoded.
    """
    with contextlib.closing(_decode_frames(path, max_pixels)) as frames:
        for frame in frames:
            return _convert_frame(frame)
    raise ClipError(NO_FRAMES)


class Reader:
    """Reads frames of one video. Pieces requested in order are decoded in one pass."""

    def __init__(self, path: Path):
        self.path = path
        self._frames: Generator[Any, None, None] | None = None
        self._next = 0
        self._last: dict[int, Image.Image] = {}  # only one: frames are large

    def read(self, numbers: Sequence[int], begins: Fraction | None = None) -> list[Image.Image]:
        """Decode frames as upright RGB images.

        Args:
            numbers: frame numbers, from 0; not decreasing, repeats allowed.
            begins: second at which the first of these frames is shown, to skip decoding what lies before it; None
                decodes from the start of the file.

        Raises:
            ClipError: the file has fewer frames, or cannot be decoded.
        """
        pictures = {number: picture for number, picture in self._last.items() if number in numbers}
        missing = [number for number in numbers if number not in pictures]
        try:
            frames = self._frames
            if missing and (frames is None or missing[0] < self._next):
                frames = self._open(missing[0], begins)
            while frames is not None and missing and self._next <= missing[-1]:
                frame = next(frames, None)
                if frame is None:
                    raise ClipError(Message("the video has fewer than {count} frames", count=numbers[-1] + 1))
                if self._next in missing:
                    pictures[self._next] = _convert_frame(frame)
                self._next += 1
        except ClipError:
            self.close()
            raise
        self._last = {numbers[-1]: pictures[numbers[-1]]}
        return [pictures[number] for number in numbers]

    def _open(self, number: int, begins: Fraction | None) -> Generator[Any, None, None]:
        """Open the file so that frame `number` comes next if a seek to its time finds it, else at the first frame."""
        self.close()
        if number and begins is not None:
            frames = _decode_frames(self.path, begins=begins)
            # Damage met while seeking is ignored: decoding from the start reports it if it matters.
            with contextlib.suppress(ClipError):
                for frame in frames:
                    time = None if frame.pts is None else frame.pts * frame.time_base
                    if time == begins:
                        self._frames, self._next = _chain(frame, frames), number
                        return self._frames
                    if time is None or time > begins:
                        break
            frames.close()
        self._frames, self._next = _decode_frames(self.path), 0
        return self._frames

    def close(self) -> None:
        """Close the file; the next `read` opens it again."""
        if self._frames is not None:
            self._frames.close()
        self._frames, self._last = None, {}


def _chain(first: Any, others: Iterator[Any]) -> Generator[Any, None, None]:
    yield first
    yield from others


def read(path: Path, numbers: Sequence[int]) -> list[Image.Image]:
    """Decode frames with a `Reader` that is used once."""
    with contextlib.closing(Reader(path)) as reader:
        return reader.read(numbers)


def _decode_frames(path: Path, max_pixels: int = 0, begins: Fraction | None = None) -> Generator[Any, None, None]:
    """Yield the frames of the first video stream in display order.

    Args:
        path: the video file.
        max_pixels: maximum per frame; 0 allows any number.
        begins: second that is wanted; frames before the keyframe that precedes it are left out if that changes no
            pixel.
    """
    try:
        import av
    except ModuleNotFoundError:
        raise ClipError(NEEDED) from None

    try:
        with open_regular(path):  # FFmpeg would wait forever on a named pipe
            pass
        try:
            container = av.open(str(path), options=CONTAINERS)
        except av.error.ArgumentError:
            raise ClipError(
                Message(
                    "the video cannot be decoded: its content is not one of {suffixes}, despite its name",
                    suffixes=" ".join(VIDEOS),
                )
            ) from None
        with container:
            if not container.streams.video:
                raise ClipError(Message("the file contains no video"))
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            stream.codec_context.thread_count = min(4, os.cpu_count() or 1)  # each thread holds its own frames
            _check_shape_of_pixels(stream.sample_aspect_ratio)
            _check_size(stream.codec_context, max_pixels)  # before memory for a frame is allocated
            if begins is not None and stream.time_base and _can_begin_anywhere(container, stream):
                # Go back one more second, as a keyframe may be stored before frames that are shown earlier.
                container.seek(int((begins - 1) / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                _check_size(frame, max_pixels)
                if frame.is_corrupt:
                    raise ClipError(Message("the file is damaged; save it again"))
                yield frame
    except (av.error.FFmpegError, OSError) as error:
        raise ClipError(CANNOT_BE_DECODED(why=reason(error))) from error


def _can_begin_anywhere(container: Any, stream: Any) -> bool:
    """Return True if decoding from a keyframe gives the same pixels as decoding from the start.

    In MP4 and MOV the file's index marks true keyframes. In MKV the muxer marks them, and with H.264 and HEVC these may
    be frames that refer to earlier ones.
    """
    return "mov" in container.format.name or stream.codec_context.name in ("vp8", "vp9", "libdav1d", "av1", "mjpeg")


def _check_size(picture: Any, max_pixels: int) -> None:
    pixels = picture.width * picture.height
    if max_pixels and pixels > max_pixels:
        raise TooLarge(picture.width, picture.height, max_pixels)


def _check_shape_of_pixels(ratio: Fraction | None) -> None:
    # Encoders that round sizes write ratios such as 4095:4096.
    if ratio and abs(ratio - 1) > Fraction(1, 100):
        raise ClipError(Message("the video has non-square pixels ({ratio}); convert it to square pixels", ratio=ratio))


def _convert_frame(frame: Any) -> Image.Image:
    from av.video.reformatter import Colorspace, Interpolation

    named = frame.colorspace not in (0, 2)  # 2 is "unspecified"; 0 is RGB
    matrix = None if named or frame.height < LINES_OF_709 else Colorspace.ITU709
    # Bit-exact, as the frames go into a cache that several machines may share.
    how = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.BITEXACT
    image = Image.fromarray(frame.to_ndarray(format="rgb24", src_colorspace=matrix, interpolation=how))
    # The display matrix: degrees anticlockwise, as Pillow counts them.
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
