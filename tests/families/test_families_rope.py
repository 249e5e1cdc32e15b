import numpy as np
import pytest
from families.tiny_folder import config_of, tensors_of, write_folder

from colibri.checkpoint import open_checkpoint
from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.families import plan_model
from colibri.families.config import ConfigReader
from colibri.families.rope import Rope, read_rope

HEAD_DIM = 128

SCALED = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "llama3", "factor": 32, "low_freq_factor": 1, "high_freq_factor": 4},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
     "beta_fast": 32.0, "beta_slow": 1.0},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "attention_factor": 1.25,
     "beta_fast": 20, "beta_slow": 2},
]  # fmt: skip


def rope_of(tmp_path, **config) -> Rope:
    write_folder(
        tmp_path, {"model_type": "x", "max_position_embeddings": 16384, **config}, {"t": np.zeros(1, np.float32)}
    )
    return read_rope(ConfigReader(open_checkpoint(tmp_path)), head_dim=HEAD_DIM)


@pytest.mark.parametrize("theta", [10000.0, 1e6, 500000])
@pytest.mark.parametrize("scaled", SCALED, ids=lambda scaled: "-".join(map(str, scaled.values())))
def test_frequencies_and_scale_are_those_of_transformers(tmp_path, scaled, theta):
    transformers = pytest.importorskip("transformers")
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    config = transformers.MixtralConfig(
        head_dim=HEAD_DIM, max_position_embeddings=16384, rope_parameters={**scaled, "rope_theta": theta}
    )
    if scaled["rope_type"] == "default":
        module = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
        frequencies, scale = module.MixtralRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, scale = utilities.ROPE_INIT_FUNCTIONS[scaled["rope_type"]](config)
    for form in ({"rope_parameters": {**scaled, "rope_theta": theta}}, {"rope_theta": theta, "rope_scaling": scaled}):
        rope = rope_of(tmp_path, **form)
        assert rope.inverse_frequencies.dtype == np.float32
        # One unit in the last place of a power grows to several where llama3 blends.
        np.testing.assert_allclose(rope.inverse_frequencies, frequencies.numpy(), rtol=2e-6)
        assert rope.scale == pytest.approx(scale, rel=1e-12)


def test_older_files_call_the_type_type(tmp_path):
    old = rope_of(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    new = rope_of(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    np.testing.assert_array_equal(old.inverse_frequencies, new.inverse_frequencies)


def test_a_theta_inside_the_object_goes_first(tmp_path):
    rope = rope_of(tmp_path, rope_theta=10000.0, rope_parameters={"rope_theta": 500.0})
    np.testing.assert_array_equal(rope.inverse_frequencies, rope_of(tmp_path, rope_theta=500.0).inverse_frequencies)


def test_a_model_stretched_by_yarn_has_the_longer_limit(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}
    assert rope_of(tmp_path, rope_scaling=yarn).context_limit == 65536
    assert rope_of(tmp_path, rope_scaling=None).context_limit == 16384


@pytest.mark.parametrize(
    ("rope", "error", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, UnsupportedModelError, "'dynamic'.*length of the text"),
        ({"rope_type": "longrope", "short_factor": [1]}, UnsupportedModelError, "'longrope'"),
        ({"rope_type": "mrope", "mrope_section": [8]}, UnsupportedModelError, "'mrope'"),
        ({"rope_type": "default", "mrope_section": [8]}, UnsupportedModelError, "mrope_section = \\[8\\]"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor"),
        ({"rope_type": "linear", "factor": 0}, CheckpointError, "factor = 0"),
        ({"rope_type": "linear"}, CheckpointError, "factor = None"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, CheckpointError, "high_freq_factor = None"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}, CheckpointError, "exceed"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, CheckpointError, "truncate"),
        ([], CheckpointError, "an object"),
    ],
)
def test_what_has_no_fixed_frequencies_is_refused(tmp_path, rope, error, message):
    with pytest.raises(error, match=message):
        rope_of(tmp_path, rope_scaling=rope)


def test_the_program_holds_frequencies_and_scale(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5}
    write_folder(tmp_path, config_of("mixtral", rope_scaling=yarn), tensors_of("mixtral"))
    plan = plan_model(open_checkpoint(tmp_path))
    assert plan.program.ops[1].operands["scale"] == 1.5
    assert plan.weights[1].source.read(0, 1).shape == (1, 4)
    assert plan.program.context_limit == 256
