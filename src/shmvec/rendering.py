"""Tiles frames of many envs into one picture, and shows pictures in a window.

Adapters to systems that render vector envs use it. The window needs pygame, with which Gymnasium's
own envs render; it is imported only when a :class:`Viewer` is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Viewer", "checked_frames", "tile_images"]

_MAX_DESKTOP_SHARE = 0.9  # the largest share that a window takes, in each direction


def checked_frames(rendered: Sequence[Any]) -> list[npt.NDArray[Any]]:
    """Checks the results of each env's ``render()``, and returns one frame for each.

    Args:
        rendered: One value for each env: a frame, or a list of frames, of which the last is taken
            (``render_mode="rgb_array_list"``).

    Returns:
        One frame for each env, ``(height, width)`` or ``(height, width, 1, 3 or 4)``.

    Raises:
        ValueError: There is no frame, or a value is not a frame; the message names the env.
    """
    frames = []
    for env, value in enumerate(rendered):
        if isinstance(value, list) and value:
            value = value[-1]
        if value is None or isinstance(value, (str, list)):
            raise ValueError(
                f"render() of env {env} returned {'no frame' if value is None else repr(value)}: "
                'make the envs with render_mode="rgb_array"'
            )
        frame = np.asarray(value)
        if frame.ndim not in (2, 3) or (frame.ndim == 3 and frame.shape[2] not in (1, 3, 4)):
            raise ValueError(
                f"the frame of env {env} has shape {frame.shape}; expected (height, width), for "
                "grey, or (height, width, channels) with 1, 3 or 4 channels"
            )
        if frame.dtype.kind not in "buif" or frame.size == 0:
            raise ValueError(f"the frame of env {env} has no numbers: {frame.dtype}, {frame.shape}")
        frames.append(frame)
    if not frames:
        raise ValueError("there is no frame: at least one env must be rendered")
    return frames


def tile_images(frames: Sequence[Any]) -> npt.NDArray[Any]:
    """Makes one picture of many frames, on a grid that is close to a square.

    Args:
        frames: An array ``(n, height, width, channels)``, or a sequence of frames, whose sizes may
            differ: each ``(height, width)``, grey, or ``(height, width, channels)`` with 1, 3 or 4
            channels. The fourth, alpha, is left out.

    Returns:
        The picture, ``(rows * height, columns * width, 3)``, in the frames' dtype. There are
        ``ceil(sqrt(n))`` rows, filled one after the other. Tiles are as high as the highest frame
        and as wide as the widest; where there is no frame, the picture is black.

    Raises:
        ValueError: There is no frame, or a value is not a frame.

    Example:
        >>> import numpy as np
        >>> from shmvec.rendering import tile_images
        >>> tile_images([np.full((2, 3, 3), 10 * i, np.uint8) for i in range(5)]).shape
        (6, 6, 3)
    """
    checked = checked_frames(list(frames))
    rows = math.ceil(math.sqrt(len(checked)))
    columns = math.ceil(len(checked) / rows)
    height = max(frame.shape[0] for frame in checked)
    width = max(frame.shape[1] for frame in checked)
    dtype = np.result_type(*(frame.dtype for frame in checked))
    picture = np.zeros((rows * height, columns * width, 3), dtype)
    for index, frame in enumerate(checked):
        row, column = divmod(index, columns)
        colors = frame[:, :, None] if frame.ndim == 2 else frame[:, :, :3]
        tile = picture[row * height : (row + 1) * height, column * width : (column + 1) * width]
        tile[: frame.shape[0], : frame.shape[1]] = colors
    return picture


class Viewer:
    """A window that shows one picture after another; the first one opens it.

    pygame has one window a process: several viewers share it.

    Attributes:
        isopen: Whether the window is open. It is not before the first picture, after
            :meth:`close`, and after the user has closed it; the next picture reopens it.
    """

    def __init__(self, title: str = "shmvec") -> None:
        """Imports pygame; no window is opened yet.

        Args:
            title: The window's title.

        Raises:
            ImportError: pygame is not installed.
        """
        try:
            import pygame
        except ImportError as error:
            raise ImportError(
                'a window needs pygame: pip install pygame. render(mode="rgb_array") needs nothing'
            ) from error
        self._pygame: Any = pygame
        self._title = title
        self._window: Any = None

    @property
    def isopen(self) -> bool:
        """Whether the window is open."""
        self._update()
        return self._window is not None

    def imshow(self, picture: npt.NDArray[Any]) -> None:
        """Shows a picture, scaled to the window; the first picture sets the window's size.

        Args:
            picture: uint8 ``(height, width)`` or ``(height, width, 1, 3 or 4)``.

        Raises:
            ValueError: The picture is not such an array.
        """
        frame = np.asarray(picture)
        if frame.dtype != np.uint8:
            raise ValueError(f"a window shows pictures of uint8, got {frame.dtype}")
        colors = tile_images([frame])
        pygame = self._pygame
        if not self.isopen:
            self._open(colors.shape[1], colors.shape[0])
        surface = pygame.image.frombuffer(colors.tobytes(), colors.shape[1::-1], "RGB")
        if surface.get_size() != self._window.get_size():
            surface = pygame.transform.smoothscale(surface, self._window.get_size())
        self._window.blit(surface, (0, 0))
        pygame.display.flip()

    def close(self) -> None:
        """Closes the window, if it is open; a second call is harmless."""
        if self._window is not None:
            is_current = self._pygame.display.get_surface() is self._window
            self._window = None
            if is_current:  # not if another viewer, or an env that renders here, uses the window
                self._pygame.display.quit()

    def _open(self, width: int, height: int) -> None:
        pygame = self._pygame
        pygame.display.init()
        desktop = pygame.display.get_desktop_sizes()[0]
        scale = min(
            1.0, _MAX_DESKTOP_SHARE * desktop[0] / width, _MAX_DESKTOP_SHARE * desktop[1] / height
        )
        size = max(1, int(width * scale)), max(1, int(height * scale))
        self._window = pygame.display.set_mode(size, pygame.RESIZABLE)
        pygame.display.set_caption(self._title)

    def _update(self) -> None:
        """Handles the window's events: the user may have closed or resized it."""
        if self._window is None:
            return
        pygame = self._pygame
        current = pygame.display.get_surface() if pygame.display.get_init() else None
        if current is None:  # an env that renders in this process has ended pygame's display
            self._window = None
        elif pygame.event.get(pygame.QUIT):
            self.close()
        else:
            self._window = current
