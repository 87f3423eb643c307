"""Frames of a video by their number, exactly those that decoding it from the first to the last gives.

A file is indexed once by reading its packets, which decodes nothing. A frame is then decoded from the last key frame
that is not shown after it: so frames that refer to each other in both directions, and those of open groups that are
decoded after a key frame but shown before it, come out right.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path

import av
import av.video.reformatter
import numpy as np

from engine.data.sources import BadSample

OPEN_VIDEOS = 64  # decoders that are kept open, over all threads
SLACK = 0.25  # frames: how far a frame may lie from where the dataset says it is


class Index:
    """Where the frames of a video file are: all arrays in the order in which frames are shown."""

    def __init__(self, path: Path):
        """Raises BadSample if the file is missing or no video."""
        packets = []
        try:
            with av.open(str(path)) as container:
                stream = _stream(container)
                self.time_base = Fraction(stream.time_base)
                for packet in container.demux(stream):
                    if packet.pts is not None and packet.size and not packet.is_discard:
                        dts = packet.pts if packet.dts is None else packet.dts
                        packets.append((packet.pts, dts, packet.is_keyframe))
        except (av.FFmpegError, OSError, IndexError, ValueError) as error:
            raise BadSample(f"'{path}' {_why(error)}") from None
        if not packets:
            raise BadSample(f"'{path}' holds no frame")
        pts, dts, key = (np.array(part) for part in zip(*packets, strict=True))
        order = np.argsort(pts, kind="stable")
        keys = np.flatnonzero(key)  # in the order of decoding
        if not len(keys):
            raise BadSample(f"'{path}' holds no key frame")
        order = order[pts[order] >= pts[keys[0]]]  # what is shown before the first key frame cannot be decoded
        starts = np.searchsorted(np.maximum.accumulate(pts[keys]), pts[order], side="right") - 1
        self.pts = pts[order]
        self.seek = dts[keys][starts]  # what to seek to, for each frame
        self.seconds = (self.pts - self.pts[0]) * float(self.time_base)  # from the first frame

    def __len__(self) -> int:
        return len(self.pts)

    @property
    def fps(self) -> float:
        """Frames a second, over the whole file; 0 where there is one frame."""
        return (len(self) - 1) / float(self.seconds[-1]) if len(self) > 1 else 0.0

    def frames(self, begin: float, times: np.ndarray, fps: float) -> np.ndarray:
        """int64: the frames that are shown `times` seconds after `begin`, seconds from the file's first frame.

        Raises BadSample if there is none near one of them. Times count from the frame nearest to `begin`, because the
        lengths of the videos that a file was joined from are rounded, and the roundings add up.
        """
        first = int(self._nearest(np.array([begin]))[0])
        if abs(self.seconds[first] - begin) * fps > 2 * SLACK:
            raise BadSample(f"there is no frame at {begin:.3f} s, and the video ends at {self.seconds[-1]:.3f} s")
        wanted = self.seconds[first] + times
        found = self._nearest(wanted)
        off = np.abs(self.seconds[found] - wanted) * fps
        if len(off) and off.max() > SLACK:
            at = float(wanted[off.argmax()])
            if self.fps and abs(self.fps / fps - 1) > 1e-3:
                raise BadSample(f"has {self.fps:.4g} frames a second, and the dataset {fps:g}")
            raise BadSample(f"there is no frame at {at:.3f} s, and the video ends at {self.seconds[-1]:.3f} s")
        return found

    def _nearest(self, seconds: np.ndarray) -> np.ndarray:
        right = np.clip(self.seconds.searchsorted(seconds), 1, max(1, len(self) - 1))
        left = right - 1
        right = np.minimum(right, len(self) - 1)
        closer = np.abs(self.seconds[right] - seconds) < np.abs(self.seconds[left] - seconds)
        return np.where(closer, right, left)


class Decoder:
    """An open video, for one thread at a time. It goes on where it stands, if that is the nearest way."""

    def __init__(self, path: Path, index: Index):
        self.path, self.index = path, index
        self._container = av.open(str(path))
        self._stream = _stream(self._container)
        self._stream.codec_context.thread_count = 1  # several videos are decoded side by side instead
        self._rgb = av.video.reformatter.VideoReformatter()  # kept, as it is costly to set up for every frame
        self._frames: Iterator[av.VideoFrame] | None = None
        self._seek, self._shown = None, -1  # the key frame it began with; the last frame that came out

    def read(self, numbers: Sequence[int]) -> np.ndarray:
        """uint8 [frames, H, W, 3], RGB. Raises BadSample if one cannot be decoded."""
        images = {number: self._read(number) for number in sorted({int(n) for n in numbers})}
        return np.stack([images[int(number)] for number in numbers])

    def close(self) -> None:
        """Close the file."""
        self._container.close()

    def _read(self, number: int) -> np.ndarray:
        pts, seek = int(self.index.pts[number]), int(self.index.seek[number])
        try:
            if self._frames is None or seek != self._seek or number <= self._shown:
                self._container.seek(seek, stream=self._stream, backward=True, any_frame=False)
                self._frames, self._seek = self._container.decode(self._stream), seek
            for frame in self._frames:
                if frame.pts == pts:
                    self._shown = number
                    return self._rgb.reformat(frame, format="rgb24").to_ndarray()
        except (av.FFmpegError, OSError, ValueError) as error:
            self._frames = None
            raise BadSample(f"'{self.path}' {_why(error)} at frame {number}") from None
        self._frames = None
        raise BadSample(f"'{self.path}' cannot be decoded at frame {number}")


class Videos:
    """The videos of datasets: indexes, and decoders that are kept open and lent to threads. Safe to share."""

    def __init__(self, limit: int = OPEN_VIDEOS):
        self._limit, self._lock = limit, threading.Lock()
        self._indexes: dict[Path, Index] = {}
        self._building: dict[Path, threading.Lock] = {}
        self._idle: OrderedDict[int, Decoder] = OrderedDict()  # the longest unused first

    def index(self, path: Path) -> Index:
        """The index of a file, made at the first call. Raises BadSample."""
        with self._lock:
            building = self._building.setdefault(path, threading.Lock())
        with building:
            if path not in self._indexes:
                self._indexes[path] = Index(path)
            return self._indexes[path]

    def read(self, path: Path, numbers: Sequence[int]) -> np.ndarray:
        """uint8 [frames, H, W, 3]: frames by number. Raises BadSample."""
        with self._lent(path) as decoder:
            return decoder.read(numbers)

    def close(self) -> None:
        """Close every file."""
        with self._lock:
            for decoder in self._idle.values():
                decoder.close()
            self._idle.clear()

    @contextmanager
    def _lent(self, path: Path) -> Iterator[Decoder]:
        index = self.index(path)
        with self._lock:
            mine = next((key for key in reversed(self._idle) if self._idle[key].path == path), None)
            decoder = self._idle.pop(mine) if mine is not None else None
        if decoder is None:
            try:
                decoder = Decoder(path, index)
            except (av.FFmpegError, OSError, IndexError) as error:
                raise BadSample(f"'{path}' {_why(error)}") from None
        yield decoder
        # One that raised is not kept: what it would give next is not known.
        with self._lock:
            self._idle[id(decoder)] = decoder
            old = [self._idle.popitem(last=False)[1] for _ in range(len(self._idle) - self._limit)]
        for other in old:
            with suppress(av.FFmpegError):
                other.close()


def _stream(container: av.container.InputContainer) -> av.VideoStream:
    return container.streams.video[0]


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, IndexError):
        return "holds no video"
    return f"cannot be decoded ({getattr(error, 'strerror', None) or error})"
