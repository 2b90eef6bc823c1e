"""Frames of many envs in one picture, and the window."""

import importlib.util
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import output_of
from tables import row

from shmvec import rendering
from shmvec.rendering import Viewer, checked_frames, tile_images


def frame(value, height=2, width=3, channels=3):
    return np.full((height, width, channels), value, np.uint8)


@pytest.mark.deep
@given(st.integers(1, 30))
def test_the_grid_is_nearly_square(n):
    rows = int(np.ceil(np.sqrt(n)))
    picture = tile_images([frame(i + 1) for i in range(n)])
    assert picture.shape[0] == 2 * rows
    assert picture.shape[1] == 3 * int(np.ceil(n / rows))
    assert picture.dtype == np.uint8


@given(st.integers(1, 30))
def test_every_frame_is_where_it_belongs(n):
    """By the rule of OpenAI baselines: fill up with black, reshape, swap the inner axes."""
    frames = np.random.default_rng(n).integers(0, 256, (n, 2, 3, 3), np.uint8)
    rows = int(np.ceil(np.sqrt(n)))
    columns = int(np.ceil(n / rows))
    grid = np.zeros((rows * columns, 2, 3, 3), np.uint8)
    grid[:n] = frames
    expected = grid.reshape(rows, columns, 2, 3, 3).swapaxes(1, 2).reshape(2 * rows, 3 * columns, 3)
    np.testing.assert_array_equal(tile_images(frames), expected)
    np.testing.assert_array_equal(tile_images(list(frames)), expected)


@pytest.mark.deep
def test_missing_tiles_are_black():
    picture = tile_images([frame(9)] * 5)
    assert picture.shape == (6, 6, 3)
    assert (picture[:4] == 9).all() and (picture[4:, :3] == 9).all()
    assert (picture[4:, 3:] == 0).all()


@pytest.mark.deep
def test_grey_frames_get_three_equal_channels():
    picture = tile_images([np.full((2, 3), 7, np.uint8), frame(5, channels=1), frame(3)])
    assert picture.shape == (4, 6, 3)
    assert (picture[:2, :3] == 7).all() and (picture[:2, 3:] == 5).all()
    assert (picture[2:, :3] == 3).all()


@pytest.mark.deep
def test_sizes_may_differ():
    picture = tile_images([frame(1, 2, 3), frame(2, 4, 1), frame(3, 1, 5), frame(4, 3, 3)])
    assert picture.shape == (8, 10, 3)
    assert (picture[:2, :3] == 1).all() and (picture[2:4, :5] == 0).all()
    assert (picture[:4, 5:6] == 2).all() and (picture[:4, 6:] == 0).all()
    assert (picture[4:5, :5] == 3).all() and (picture[5:, :5] == 0).all()


@pytest.mark.deep
def test_alpha_is_left_out():
    assert tile_images([frame(9, channels=4)]).shape == (2, 3, 3)


@pytest.mark.deep
def test_the_last_of_a_list_of_frames_is_taken():
    (last,) = checked_frames([[frame(1), frame(2)]])
    assert (last == 2).all()


def test_what_is_no_frame_is_named():
    for frames, message in [
        ([], "no frame"),
        ([frame(1), None], r"env 1 returned no frame: .*render_mode=\"rgb_array\""),
        ([frame(1), "ansi"], "env 1 returned 'ansi'"),
        ([[]], r"env 0 returned \[\]"),
        ([np.zeros(3)], r"env 0 has shape \(3,\)"),
        ([frame(1, channels=2)], "1, 3 or 4 channels"),
        ([np.zeros((0, 3, 3))], "has no numbers"),
        ([np.full((2, 2), "a")], "has no numbers"),
    ]:
        with row(message), pytest.raises(ValueError, match=message):
            tile_images(frames)


@pytest.mark.deep
def test_without_pygame_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ImportError, match="pip install pygame"):
        Viewer()


@pytest.mark.deep
def test_pygame_is_not_imported_before_there_is_a_window():
    script = "import sys, shmvec.rendering; assert 'pygame' not in sys.modules"
    output_of("-c", script)
    assert "pygame" not in vars(rendering)


def in_a_window(body):
    """Runs a script without a screen, in a process of its own: SDL keeps threads and memory."""
    if importlib.util.find_spec("pygame") is None:
        pytest.skip("pygame is not installed")
    script = """
        import numpy as np, pygame
        from shmvec.rendering import Viewer

        def shown():
            window = pygame.display.get_surface()
            return window.get_size(), tuple(window.get_at((1, 1)))[:3]

        viewer = Viewer("a title")
    """
    script = textwrap.dedent(script) + textwrap.dedent(body)
    output_of("-c", script, environ={"SDL_VIDEODRIVER": "dummy"})


@pytest.mark.deep
def test_the_window_shows_the_picture():
    in_a_window("""
        assert not viewer.isopen
        viewer.imshow(np.full((40, 60, 3), (10, 20, 30), np.uint8))
        assert viewer.isopen
        assert shown() == ((60, 40), (10, 20, 30)), shown()
        assert pygame.display.get_caption()[0] == "a title"
        viewer.imshow(np.full((40, 60), 77, np.uint8))
        assert shown() == ((60, 40), (77, 77, 77)), shown()
    """)


@pytest.mark.deep
def test_a_picture_of_another_size_is_scaled_to_the_window():
    in_a_window("""
        viewer.imshow(np.zeros((40, 60, 3), np.uint8))
        viewer.imshow(np.full((80, 20, 3), 50, np.uint8))
        assert shown() == ((60, 40), (50, 50, 50)), shown()
    """)


@pytest.mark.deep
def test_a_window_is_no_larger_than_the_screen():
    in_a_window("""
        viewer.imshow(np.full((400, 5000, 3), 50, np.uint8))
        width, height = shown()[0]
        screen = pygame.display.get_desktop_sizes()[0]
        assert width <= screen[0] and abs(width / height - 12.5) < 0.5, shown()
    """)


@pytest.mark.deep
def test_the_user_closes_the_window_and_the_next_picture_opens_it():
    in_a_window("""
        picture = np.zeros((40, 60, 3), np.uint8)
        viewer.imshow(picture)
        pygame.event.post(pygame.event.Event(pygame.QUIT))
        assert not viewer.isopen
        assert not pygame.display.get_init()
        viewer.imshow(picture)
        assert viewer.isopen
    """)


@pytest.mark.deep
def test_close_may_be_called_twice():
    in_a_window("""
        viewer.close()
        viewer.imshow(np.zeros((40, 60, 3), np.uint8))
        viewer.close()
        viewer.close()
        assert not viewer.isopen and not pygame.display.get_init()
    """)


@pytest.mark.deep
def test_an_env_that_ends_pygames_display_does_no_harm():
    in_a_window("""
        viewer.imshow(np.zeros((40, 60, 3), np.uint8))
        pygame.quit()
        assert not viewer.isopen
        viewer.imshow(np.zeros((40, 60, 3), np.uint8))
        assert viewer.isopen
    """)


@pytest.mark.deep
def test_only_pictures_of_bytes_are_shown():
    in_a_window("""
        for picture, error in ((np.zeros((4, 6, 3)), "uint8"), (np.zeros(3, np.uint8), "shape")):
            try:
                viewer.imshow(picture)
            except ValueError as raised:
                assert error in str(raised), raised
            else:
                raise AssertionError(picture)
    """)
