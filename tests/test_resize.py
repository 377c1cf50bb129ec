"""``pixfuse resize``: kinds of pictures, filters, folders, and what it refuses."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from pixfuse._cli.main import app


def call(*words):
    return CliRunner().invoke(app, ["resize", *map(str, words)])


def done(*words):
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def cat(tmp_path):
    """A smooth colour picture, 40x30."""
    rows, columns = np.mgrid[0:30, 0:40]
    pixels = np.stack([rows * 8, columns * 6, 255 - rows * 4 - columns * 2], -1).astype(np.uint8)
    path = tmp_path / "cat.png"
    Image.fromarray(pixels).save(path)
    return path


def pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture).astype(np.float64)


@pytest.mark.parametrize("filter", ["lanczos", "bicubic", "bilinear", "nearest", "1,3,3,1", "1,2,1", "1,1"])
@pytest.mark.parametrize(("scale", "size"), [(2, (80, 60)), (0.5, (20, 15)), (1, (40, 30))])
def test_filters_keep_the_picture(cat, tmp_path, filter, scale, size):
    out = tmp_path / "out.png"
    done(cat, "--scale", scale, "--filter", filter, "-o", out)
    with Image.open(out) as picture:
        assert picture.size == size
        assert picture.mode == "RGB"
    # The same picture, at most a pixel away from where Pillow puts it: no shift, no dark border.
    with Image.open(cat) as picture:
        truth = np.asarray(picture.resize(size, Image.Resampling.BILINEAR)).astype(np.float64)
    assert np.abs(pixels(out) - truth).max() <= 8 / min(scale, 1) + 1


@pytest.mark.parametrize(
    ("filter", "pillow"),
    [
        ("lanczos", Image.Resampling.LANCZOS),
        ("bilinear", Image.Resampling.BILINEAR),
        ("nearest", Image.Resampling.NEAREST),
    ],
)
@pytest.mark.parametrize("size", ["16x12", "96x70"])  # no sample lies on an edge between two
def test_agrees_with_pillow(tmp_path, filter, pillow, size):
    # Far from black and white: Pillow saturates between its two passes.
    noise = np.random.default_rng(0).integers(80, 176, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    done(tmp_path / "noise.png", "--size", size, "--filter", filter, "-o", tmp_path / "out.png")
    wanted = np.asarray(Image.fromarray(noise).resize(tuple(map(int, size.split("x"))), pillow)).astype(np.float64)
    difference = np.abs(pixels(tmp_path / "out.png") - wanted)
    assert difference.max() <= (0 if filter == "nearest" else 2)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "CMYK", "1", "P"])
def test_kinds_of_pixels(tmp_path, mode):
    source, out = tmp_path / "in.tif", tmp_path / "out.tif"
    picture = Image.new("RGB", (8, 6), (200, 100, 50))
    (picture.quantize(2) if mode == "P" else picture.convert(mode)).save(source)
    done(source, "--scale", 2, "-o", out)
    with Image.open(source) as before, Image.open(out) as after:
        assert after.size == (16, 12)
        assert after.mode == {"1": "L", "P": "RGB"}.get(mode, mode)
        close = np.asarray(before.convert("RGB").resize((16, 12))).astype(int) - np.asarray(after.convert("RGB"))
    if mode != "1":  # that one is a dither
        assert np.abs(close).max() <= 1


def test_16_bit_greyscale_keeps_its_bits(tmp_path):
    values = np.tile(np.array([0, 1001, 40003, 65535], dtype=np.uint16), (4, 1))
    Image.fromarray(values).save(tmp_path / "deep.png")
    done(tmp_path / "deep.png", "--scale", 2, "--filter", "nearest", "-o", tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as picture:
        assert np.array_equal(np.asarray(picture), values.repeat(2, 0).repeat(2, 1))
    done(tmp_path / "deep.png", "--scale", 2, "-o", tmp_path / "smooth.png")
    with Image.open(tmp_path / "smooth.png") as picture:
        smooth = np.asarray(picture)
    assert smooth.max() == 65535  # saturated, not wrapped
    assert len(np.unique(smooth % 256)) > 2


def test_says_what_is_lost(tmp_path):
    """Pillow has no 16-bit colours, and one picture comes out of an animation."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\x12\x34" * 12) * 4)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    (tmp_path / "deep.png").write_bytes(png)
    result = done(tmp_path / "deep.png", "--scale", 2, "-o", tmp_path / "out.png")
    assert "deep.png: Pillow reads its 16-bit colours with 8 bits" in result.output
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moves.gif", save_all=True, append_images=frames[1:])
    result = done(tmp_path / "moves.gif", "--scale", 2, "-o", tmp_path / "still.png")
    assert "moves.gif: only the first of its frames is taken" in result.output


def test_constant_stays_constant(tmp_path):
    Image.new("RGBA", (9, 7), (200, 13, 255, 128)).save(tmp_path / "flat.png")
    for filter in ("lanczos", "bicubic", "bilinear", "nearest", "1,3,3,1"):
        done(tmp_path / "flat.png", "--scale", 2, "--filter", filter, "-o", tmp_path / f"{filter}.png")
        assert np.array_equal(
            np.unique(pixels(tmp_path / f"{filter}.png").reshape(-1, 4), axis=0), [[200, 13, 255, 128]]
        )


def test_invisible_colours_do_not_shine_through(tmp_path):
    picture = Image.new("RGBA", (8, 8), (0, 255, 0, 0))
    picture.paste((255, 0, 0, 255), (0, 0, 4, 8))
    picture.save(tmp_path / "in.png")
    done(tmp_path / "in.png", "--scale", 2, "--filter", "bilinear", "-o", tmp_path / "out.png")
    values = pixels(tmp_path / "out.png")
    visible = values[..., 3] > 8
    assert values[visible][:, 1].max() <= 2


def test_exif_orientation(tmp_path):
    picture = Image.new("RGB", (8, 4), "black")
    picture.paste("white", (0, 0, 4, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to show
    picture.save(tmp_path / "turned.png", exif=exif)
    done(tmp_path / "turned.png", "--scale", 2, "--filter", "nearest", "-o", tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as result:
        assert result.size == (8, 16)
        assert result.getexif().get(0x0112, 1) == 1
    values = pixels(tmp_path / "out.png")
    assert values[:8].min() == 255
    assert values[8:].max() == 0


def test_colour_profile_is_kept(cat, tmp_path):
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    with Image.open(cat) as picture:
        picture.save(tmp_path / "tagged.png", icc_profile=profile)
    done(tmp_path / "tagged.png", "--scale", 2, "-o", tmp_path / "out.jpg")
    with Image.open(tmp_path / "out.jpg") as result:
        assert result.info["icc_profile"] == profile


def test_folder(cat, tmp_path):
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.png", "b.jpg", "deep/c.webp"):
        with Image.open(cat) as picture:
            picture.save(folder / name)
    (folder / "notes.txt").write_text("no picture")
    result = done(folder, "--size", "20x20", "-o", tmp_path / "out")
    found = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert found == ["a.png", "b.jpg", "deep/c.webp"]
    assert result.output.count("40x30 -> 20x20") == 3


def test_several_files(cat, tmp_path):
    with Image.open(cat) as picture:
        picture.save(tmp_path / "dog.png")
    done(cat, tmp_path / "dog.png", "--scale", 0.5, "-o", tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["cat.png", "dog.png"]


def test_never_overwrites_silently(cat, tmp_path):
    before = cat.read_bytes()
    result = call(cat, "--scale", 2, "-o", cat)
    assert result.exit_code == 1
    assert "is an input; --overwrite allows it" in result.output
    assert cat.read_bytes() == before
    (tmp_path / "link.png").symlink_to(cat)
    assert call(cat, "--scale", 2, "-o", tmp_path / "link.png").exit_code == 1
    assert call(tmp_path, "--scale", 2, "-o", tmp_path).exit_code == 1
    assert cat.read_bytes() == before
    other = tmp_path / "other.png"
    other.write_bytes(b"precious")
    result = call(cat, "--scale", 2, "-o", other)
    assert "exists; --overwrite" in result.output
    assert other.read_bytes() == b"precious"
    done(cat, "--scale", 2, "-o", cat, "--overwrite")
    with Image.open(cat) as picture:
        assert picture.size == (80, 60)


def test_one_bad_file_does_not_stop_the_others(cat, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n but no more")
    (tmp_path / "text.jpg").write_text("hello")
    broken = tmp_path / "broken.png"
    broken.write_bytes(cat.read_bytes()[:-60])
    names = [tmp_path / "bad.png", tmp_path / "text.jpg", broken, tmp_path / "none.png", cat]
    result = call(*names, "--scale", 2, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert (tmp_path / "out/cat.png").exists()
    assert "bad.png: it " in result.output
    assert "text.jpg: it isn't a picture" in result.output
    assert "broken.png: it can't be read" in result.output
    assert "none.png: there is no such file" in result.output
    assert "4 of 5 pictures failed." in result.output
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["cat.png"]
    assert "Traceback" not in result.output


def test_a_format_without_alpha(tmp_path):
    Image.new("RGBA", (4, 4)).save(tmp_path / "in.png")
    result = call(tmp_path / "in.png", "--scale", 2, "-o", tmp_path / "out.jpg")
    assert result.exit_code == 1
    assert "a JPEG file can't hold a picture with transparency: use .png or .tif" in result.output
    assert not (tmp_path / "out.jpg").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either --scale or --size"),
        (["--scale", 2, "--size", "3x4"], "give either --scale or --size"),
        (["--size", "3"], "--size must be WIDTHxHEIGHT, for example 640x480, got '3'"),
        (["--size", "0x4"], "--size must be WIDTHxHEIGHT"),
        (["--scale", 0], "--scale must be greater than 0, got 0"),
        (["--scale", -2], "--scale must be greater than 0"),
        (["--scale", "nan"], "--scale must be greater than 0"),
        (
            ["--scale", 2, "--filter", "gauss"],
            "--filter must be one of lanczos, bicubic, bilinear, nearest, or FIR taps",
        ),
        (["--scale", 2, "--filter", "1,-1"], "sum other than 0"),
        (["--scale", 1.5, "--filter", "1,3,3,1"], "FIR taps need a --scale of a whole number"),
        (["--scale", 3, "--filter", "1,3,3,1"], "would give stripes at --scale 3: every 3. tap sums to 2, 3, 3"),
        (["--size", "9x9", "--filter", "1,3,3,1"], "needs --scale"),
    ],
)
def test_refused_arguments(cat, tmp_path, words, message):
    result = call(cat, *words, "-o", tmp_path / "out.png")
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out.png").exists()


def test_refused_outputs(cat, tmp_path):
    assert "can't write .xyz" in call(cat, "--scale", 2, "-o", tmp_path / "out.xyz").output
    with Image.open(cat) as picture:
        picture.save(tmp_path / "dog.png")
    several = [cat, tmp_path / "dog.png"]
    assert "must be a folder" in call(*several, "--scale", 2, "-o", tmp_path / "out.png").output
    assert "would both be written" in call(cat, cat, "--scale", 2, "-o", tmp_path / "out").output
    (tmp_path / "empty").mkdir()
    assert "has no pictures" in call(tmp_path / "empty", "--scale", 2, "-o", tmp_path / "out").output


def test_help_is_for_newcomers():
    result = CliRunner().invoke(app, ["resize", "--help"])
    assert result.exit_code == 0
    for words in ("--scale", "--size", "lanczos", "--out", "Examples"):
        assert words in result.output
