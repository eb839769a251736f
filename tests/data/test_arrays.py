"""Flat arrays against numpy, and files that are damaged."""

import contextlib
import os
import re
import threading

import numpy as np
import pytest
from etils import epath

from jaxlm.data import arrays
from jaxlm.data.arrays import ArrayWriter, Files, FlatArray, Increasing, IncreasingWriter, Spliced, write_array
from jaxlm.errors import UserError


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(arrays, "STRIDE", 4)
    monkeypatch.setattr(arrays, "_OPEN", 3)


def written(folder, name, values, draw):
    """Write an array in several goes."""
    writer = ArrayWriter(epath.Path(folder) / name, str(values.dtype))
    for part in np.split(values, np.sort(draw.integers(0, len(values) + 1, draw.integers(0, 5)))):
        writer.append(part)
    assert writer.close() == len(values)
    return epath.Path(folder) / name


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int64"])
def test_ranges_and_windows(tmp_path, dtype):
    draw, per = np.random.default_rng(0), (arrays.BLOCK - 8) // np.dtype(dtype).itemsize
    for size in (0, 1, per - 1, per, per + 1, 2 * per, 3 * per + 7):
        values = draw.integers(1, np.iinfo(dtype).max, size, dtype, endpoint=True)
        path = written(tmp_path, str(size), values, draw)
        assert path.stat().length == -(-size // per) * arrays.BLOCK
        array = FlatArray(path, dtype, size)
        np.testing.assert_array_equal(array.read(0, size), values)
        for _ in range(20):
            start = draw.integers(0, size + 1, 9)
            count = np.minimum(draw.integers(0, draw.choice([3, per, 3 * per]), 9), size - start)
            expected = np.concatenate([values[s : s + n] for s, n in zip(start, count, strict=True)])
            np.testing.assert_array_equal(array.ranges(start, count), expected)
            length = int(draw.integers(1, 2 * per))
            padded = np.concatenate([values, np.zeros(length, dtype)])
            np.testing.assert_array_equal(array.windows(start, length), padded[start[:, None] + np.arange(length)])
        assert array.read(0, 0).size == 0 and array.read(0, size).dtype == np.dtype(dtype)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files by /proc")
def test_open_files_are_few_of_all_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_OPEN", 40)
    paths = [str(tmp_path / f"file{number}") for number in range(30)]
    for path in paths:
        write_array(epath.Path(path), np.arange(9))
    every = [Files(paths, "int64") for _ in range(4)]
    for files in every:
        assert files.read(np.arange(30), np.full(30, 3), np.full(30, 2)).tolist() == [3, 4] * 30
    assert 4 <= len(open_files(tmp_path)) <= 40


@pytest.mark.parametrize("resident", [0, 1 << 20])
def test_increasing_arrays(tmp_path, monkeypatch, resident):
    monkeypatch.setattr(arrays, "_RESIDENT", resident)
    draw = np.random.default_rng(1)
    for size in (1, 3, 4, 5, 8, 509, 1024, 1500):
        steps = draw.integers(1, 1 << 34, size)
        writer = IncreasingWriter(epath.Path(tmp_path) / f"file{size}")
        for part in np.split(steps, np.sort(draw.integers(0, size + 1, 3))):
            writer.append(part)
        assert writer.close() == size and writer.last == steps.sum()
        values = np.concatenate([[0], np.cumsum(steps)])
        array = Increasing(epath.Path(tmp_path) / f"file{size}", size)
        if resident and os.path.isdir("/proc/self/fd"):
            assert not open_files(tmp_path)  # a mixture may have hundreds of arrays
        assert array.is_resident == (resident > 0)
        np.testing.assert_array_equal(array.samples, np.append(values[:-1:4], values[-1]))
        np.testing.assert_array_equal(array.read(0, size + 1), values)
        wanted = np.concatenate([draw.integers(0, values[-1], 50), values[:-1], values[1:] - 1])
        np.testing.assert_array_equal(array.search(wanted), np.searchsorted(values, wanted, side="right") - 1)
        first, count = draw.integers(0, size + 1, 7), int(draw.integers(1, 40))
        numbers = np.minimum(first[:, None] + np.arange(count), size)
        np.testing.assert_array_equal(array.windows(first, count), values[numbers])
        several = np.minimum(draw.integers(0, 9, 7), size + 1 - first)
        expected = [values[s : s + n] for s, n in zip(first, several, strict=True)]
        np.testing.assert_array_equal(array.ranges(first, several), np.concatenate(expected))


def spliced(folder, draw, files, has_base=False):
    """Return random runs of random files as an array, and its elements."""
    folder.mkdir()
    runs, places = IncreasingWriter(epath.Path(folder) / "runs"), ArrayWriter(epath.Path(folder) / "places", "int64")
    base = draw.integers(0, 1 << 20, files) if has_base else None
    starts, expected = [0], [np.zeros(0, np.int64)]
    for number in range(files):
        size = int(draw.integers(1, draw.choice([3, 5000])))
        values = draw.integers(0, 5, size, "uint16") if has_base else draw.integers(0, 1 << 16, size, "uint16")
        written(folder, f"file{number}", values, draw)
        chosen = np.repeat(draw.random(size) < 0.5, draw.integers(1, 99, size))[:size]
        begins = np.flatnonzero(chosen & ~np.append(False, chosen[:-1]))
        ends = 1 + np.flatnonzero(chosen & ~np.append(chosen[1:], False))
        runs.append(ends - begins)
        places.append(starts[-1] + begins)
        starts.append(starts[-1] + size)
        kept = values[chosen].astype(np.int64)
        expected.append(np.where(kept, kept + base[number], 0) if has_base else kept)
    count = runs.close()
    places.close()
    array = Spliced(Files([str(folder / f"file{number}") for number in range(files)], "uint16"), np.array(starts),
                    Increasing(epath.Path(folder) / "runs", count), FlatArray(folder / "places", "int64", count), base)
    return array, np.concatenate(expected)


def open_files(folder):
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return [link for link in links if link.startswith(f"{folder}/file")]


@pytest.mark.parametrize("has_base", [False, True])
@pytest.mark.parametrize("resident", [0, 1 << 20])
def test_runs_of_several_files(tmp_path, monkeypatch, resident, has_base):
    monkeypatch.setattr(arrays, "_RESIDENT", resident)
    draw = np.random.default_rng(2)
    for trial in range(12):
        array, values = spliced(tmp_path / str(trial), draw, int(draw.integers(1, 12)), has_base)
        assert array.size == len(values)
        np.testing.assert_array_equal(array.read(0, len(values)), values)
        for _ in range(8):
            start, length = draw.integers(0, len(values) + 1, 6), int(draw.integers(1, draw.choice([9, 3000])))
            padded = np.concatenate([values, np.zeros(length, np.int64)])
            np.testing.assert_array_equal(array.windows(start, length), padded[start[:, None] + np.arange(length)])


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files by /proc")
def test_few_files_are_open_whoever_reads(tmp_path):
    """Eight threads read the same rows as one, and no file stays open."""
    draw = np.random.default_rng(3)
    array, values = spliced(tmp_path / "a", draw, 12)
    errors = []

    def read(seed):
        try:
            for start in np.random.default_rng(seed).integers(0, len(values) - 50, (15, 9)):
                np.testing.assert_array_equal(array.windows(start, 50), values[start[:, None] + np.arange(50)])
                assert len(open_files(tmp_path / "a")) <= 3
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and 0 < len(open_files(tmp_path / "a")) <= 3
    array = None
    assert not open_files(tmp_path / "a")


def test_a_file_is_read_in_as_many_calls_as_it_takes(tmp_path, monkeypatch):
    """Linux reads at most 2 GiB in one."""
    values, read = np.arange(3000, dtype="uint16"), os.pread
    write_array(epath.Path(tmp_path) / "values", values)
    monkeypatch.setattr(os, "pread", lambda file, size, start: read(file, min(size, 1000), start))
    np.testing.assert_array_equal(FlatArray(tmp_path / "values", "uint16", 3000).read(0, 3000), values)


def test_damage_is_one_sentence(tmp_path):
    """Cut off at any length or with any bit flipped, a file gives its elements or one sentence."""
    values = np.random.default_rng(4).integers(1, 1 << 16, 3000, "uint16")
    path = tmp_path / "folder" / "values"
    path.parent.mkdir()
    write_array(epath.Path(path), values)
    data = path.read_bytes()
    told = rf"^{path} is (?:missing|damaged \(.+\)); delete {path.parent} and run again, which makes it"

    def refused():
        try:
            np.testing.assert_array_equal(FlatArray(path, "uint16", 3000).read(0, 3000), values)
        except UserError as error:
            assert re.search(told, str(error)) and "\n" not in str(error)
            with pytest.raises(UserError, match=told):
                FlatArray(path, "uint16", 3000).windows(np.array([0, 1000, 2500]), 1500)
            return True
        return False

    assert not refused()
    for length in (0, 1, 4095, 4096, 4097, len(data) - 4096, len(data) - 1):
        path.write_bytes(data[:length])
        assert refused()
    draw, checksums = np.random.default_rng(5), [4088 + 4096 * block + byte for block in (0, 1) for byte in range(8)]
    for place in [0, 1, 4087, 4096, *checksums, *draw.integers(0, len(data), 40).tolist()]:
        changed = bytearray(data)
        changed[place] ^= 1 << draw.integers(8)
        path.write_bytes(changed)
        assert refused() == (place % 4096 < 4092), place
    path.unlink()
    assert refused()
    with pytest.raises(UserError, match=f"^{path} is missing; delete"):
        FlatArray(path, "uint16", 3000).read(0, 1)
    path.mkdir()
    assert refused()
