"""Reports in a real browser: nothing to complain about, and plots that have ink."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from loadtest.report.page import report_page
from loadtest.result import CompareResult, RunResult, SearchResult
from tests.support.load_results import (
    make_compare,
    make_hostile,
    make_records,
    make_run,
    make_search,
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LIGHT, DARK = "1", "0"  # as Blink counts them
Picture = npt.NDArray[np.uint8]  # [height, width, 3]

# The colours of the first two series of a plot, of limits, and of the ground: style.py.
FIRST = {LIGHT: (0x00, 0x72, 0xB2), DARK: (0x58, 0xB4, 0xEE)}
SECOND = {LIGHT: (0xD5, 0x5E, 0x00), DARK: (0xFF, 0x8B, 0x4A)}
GROUND = {LIGHT: (0xF6, 0xF7, 0xF9), DARK: (0x11, 0x16, 0x1D)}

# Pixels a plot has of them at least; keys of legends alone have fewer.
MIN_FIRST, MIN_SECOND = 60, 20

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def browser() -> str:
    """Return the path of Chromium, or skip."""
    for name in BROWSERS:
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip("no Chromium is installed (apt-get install chromium)")


def look(
    browser: str, page: str, directory: Path, size: tuple[int, int], scheme: str
) -> tuple[list[str], Picture]:
    """Open a page; return what the browser complained about, and what it shows."""
    file, picture = directory / "report.html", directory / "picture.png"
    file.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [
            browser,
            "--headless=new",
            "--no-sandbox",  # needs rights that containers lack; the page is our own
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={directory / 'profile'}",
            f"--blink-settings=preferredColorScheme={scheme}",
            "--force-device-scale-factor=0.5",  # a quarter of the pixels to decode
            f"--window-size={size[0]},{size[1]}",
            f"--screenshot={picture}",
            file.as_uri(),
        ],
        capture_output=True,
        timeout=200,
        check=True,
    )
    log = done.stderr.decode(errors="replace").splitlines()
    return [line for line in log if "CONSOLE" in line], read_png(picture.read_bytes())


def read_png(content: bytes) -> Picture:
    """Decode what Chromium writes: eight bits a channel, three or four channels, not interlaced."""
    at, data, header = 8, b"", b""
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        body = content[at + 8 : at + 8 + length]
        header = body if kind == b"IHDR" else header
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    assert (depth, interlaced) == (8, 0)
    channels = {2: 3, 6: 4}[colour]
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    before = np.zeros(width * channels, np.uint8)
    rows = []
    for line in lines:
        before = undo_filter(int(line[0]), line[1:], before, channels)
        rows.append(before)
    return np.stack(rows).reshape(height, width, channels)[:, :, :3]


def undo_filter(
    kind: int, line: npt.NDArray[np.uint8], above: npt.NDArray[np.uint8], channels: int
) -> npt.NDArray[np.uint8]:
    """Undo the filter of one line of a PNG."""
    if kind == 0:
        return line
    if kind == 2:
        return line + above
    if kind == 1:
        sums = np.cumsum(line.reshape(-1, channels), axis=0, dtype=np.uint64)
        return (sums % 256).astype(np.uint8).reshape(-1)
    left, corner = [0] * channels, [0] * channels
    told, up = line.tolist(), above.tolist()
    for at, value in enumerate(told):
        channel = at % channels
        if kind == 3:
            guess = (left[channel] + up[at]) // 2
        else:
            guess = paeth(left[channel], up[at], corner[channel])
        told[at] = left[channel] = (value + guess) % 256
        corner[channel] = up[at]
    return np.array(told, np.uint8)


def paeth(left: int, up: int, corner: int) -> int:
    """Return the neighbour closest to left + up - corner."""
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))


def ink(picture: Picture, colour: tuple[int, int, int]) -> int:
    """Count the pixels of a colour, or nearly so."""
    distance = np.abs(picture.astype(np.int16) - np.array(colour, np.int16)).max(axis=2)
    return int((distance < 40).sum())


@pytest.mark.parametrize(
    ("result", "size", "scheme"),
    [
        pytest.param(make_run(make_records(1500)), (1200, 5200), LIGHT, id="run"),
        pytest.param(make_run(make_records(1500)), (500, 7000), DARK, id="run-on-a-phone"),
        pytest.param(make_search(), (1200, 2600), LIGHT, id="search"),
        pytest.param(make_compare(), (1200, 2600), DARK, id="compare"),
    ],
)
def test_a_browser_shows_the_plots_and_has_nothing_to_complain_about(
    browser: str,
    tmp_path: Path,
    result: RunResult | SearchResult | CompareResult,
    size: tuple[int, int],
    scheme: str,
) -> None:
    page = report_page(result)
    num_plots = page.count("<svg")
    complaints, picture = look(browser, page, tmp_path, size, scheme)
    assert complaints == []
    assert picture.shape == (size[1] // 2, size[0] // 2, 3)
    assert ink(picture, GROUND[scheme]) > 0.05 * picture.size / 3
    assert ink(picture, FIRST[scheme]) > MIN_FIRST * num_plots
    assert ink(picture, SECOND[scheme]) > MIN_SECOND * num_plots


def test_plots_without_lines_are_noticed(browser: str, tmp_path: Path) -> None:
    page = report_page(make_search()).replace("<polyline", "<desc")
    _, picture = look(browser, page, tmp_path, (1200, 2600), LIGHT)
    assert ink(picture, FIRST[LIGHT]) < MIN_FIRST * page.count("<svg")


def test_a_page_that_does_what_it_should_not_is_noticed(browser: str, tmp_path: Path) -> None:
    page = report_page(make_search()).replace("<main>", "<main><script>1</script>")
    complaints, _ = look(browser, page, tmp_path, (400, 400), LIGHT)
    assert len(complaints) == 1
    assert "violates the following Content Security Policy" in complaints[0]


def test_text_of_strangers_does_nothing(browser: str, tmp_path: Path) -> None:
    page = report_page(make_hostile(make_run(make_records(60))))
    complaints, _ = look(browser, page, tmp_path, (400, 400), LIGHT)
    assert complaints == []


def test_an_empty_page_has_no_ink(browser: str, tmp_path: Path) -> None:
    _, picture = look(browser, "<!doctype html><title>x</title>", tmp_path, (400, 400), LIGHT)
    assert ink(picture, (255, 255, 255)) == 200 * 200
