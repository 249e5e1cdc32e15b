"""Conversions in processes of their own: killed at any moment, and measured."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from families.tiny_folder import config_of, tensors_of, write_folder

from colibri.cbi import CbiFile

_CONVERT = """
import sys
from colibri.convert import convert
print("ready", flush=True)
sys.stdin.readline()
convert(sys.argv[1], sys.argv[2], weights=sys.argv[3], threads=2)
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(line.split()[1], flush=True)
"""


def start(source: Path, output: Path, weights: str) -> subprocess.Popen:
    """Start a converter that waits, with all its modules loaded, until `go`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _CONVERT, str(source), str(output), weights]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_killed_at_random_moments_no_half_file_has_the_final_name(tmp_path):
    source = write_folder(
        tmp_path / "in", config_of("qwen3_moe", num_hidden_layers=20), tensors_of("qwen3_moe", layers=20)
    )
    folder = tmp_path / "out"
    folder.mkdir()
    output = folder / "model.cbi"
    process = start(source, output, "q8")
    begin = time.monotonic()
    go(process)
    assert process.wait() == 0
    duration = time.monotonic() - begin
    complete = output.read_bytes()
    output.unlink()
    chance, killed, leftovers = random.Random(11), 0, 0
    for attempt in range(20):
        # From the sixth on an old, valid file is there, and must stay.
        if attempt == 5:
            output.write_bytes(complete)
        process = start(source, output, "q8")
        go(process)
        time.sleep(duration * chance.uniform(0.0, 0.8))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        if attempt >= 5 or output.exists():
            # Without an old file, one that finished before the signal.
            assert output.read_bytes() == complete
        if attempt < 5:
            output.unlink(missing_ok=True)
        leftovers += any(path != output for path in folder.iterdir())
    assert killed >= 10
    assert leftovers >= 3
    process = start(source, output, "q8")
    go(process)
    assert process.wait() == 0
    assert list(folder.iterdir()) == [output]
    assert output.read_bytes() == complete


@pytest.mark.parametrize(("weights", "allowed_mib"), [("q8", 150), ("f32", 150)])
def test_memory_does_not_grow_with_the_model(tmp_path, weights, allowed_mib):
    """A 256 MiB embedding (as float32), and 96 MiB of fused experts, of 6 MiB each."""
    hidden, ffn, experts, vocabulary = 1024, 512, 16, 65536
    config = config_of(
        "qwen3_moe", hidden_size=hidden, num_hidden_layers=1, num_experts=experts, moe_intermediate_size=ffn,
        vocab_size=vocabulary, tie_word_embeddings=True, head_dim=64,
    )  # fmt: skip
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.layers.0.mlp.experts.gate_up_proj": (experts, 2 * ffn, hidden),
        "model.layers.0.mlp.experts.down_proj": (experts, hidden, ffn),
        "model.layers.0.mlp.gate.weight": (experts, hidden),
        "model.layers.0.self_attn.q_proj.weight": (256, hidden),
        "model.layers.0.self_attn.k_proj.weight": (128, hidden),
        "model.layers.0.self_attn.v_proj.weight": (128, hidden),
        "model.layers.0.self_attn.o_proj.weight": (hidden, 256),
        "model.layers.0.self_attn.q_norm.weight": (64,),
        "model.layers.0.self_attn.k_norm.weight": (64,),
        "model.layers.0.input_layernorm.weight": (hidden,),
        "model.layers.0.post_attention_layernorm.weight": (hidden,),
        "model.norm.weight": (hidden,),
    }
    source = write_zeros(tmp_path / "in", config, shapes)
    output = tmp_path / "out.cbi"
    process = start(source, output, weights)
    go(process)
    peak_kib, _ = process.communicate()
    assert process.returncode == 0
    one_expert = 3 * ffn * hidden * 4 / 2**20
    assert int(peak_kib) / 1024 < allowed_mib + 2 * one_expert < 512
    with CbiFile.open(output) as file:
        assert len(file.expert_sets[0].experts) == experts
    output.unlink()


def write_zeros(folder: Path, config: dict, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Write a bf16 checkpoint of zeros as a sparse file, which takes no room on the disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2
        for side in shape:
            size *= side
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return folder
