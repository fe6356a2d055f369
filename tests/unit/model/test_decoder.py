"""The decoder agrees with transformers, for every family that loads."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lehr.core.errors import ConfigError, UnknownName
from lehr.model.config import ModelConfig
from lehr.model.decoder import Decoder
from lehr.model.tiny import random_decoder, tiny_config

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama3-bare": {
        "model_type": "llama",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "dynamic": {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 5e3},
    "yarn": {"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e3},
    "yarn-all": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 700.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 0.707,
            "mscale_all_dim": 1.5,
            "truncate": False,
        },
    },
    "yarn-factor": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 700.0,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.3,
        },
    },
    "linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e3},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
}


def causal(layer, query, key, value):
    mixed = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (query, key, value)), is_causal=True, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


def peer(name):
    raw = SMALL | FAMILIES[name]
    kind = raw.pop("model_type")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **raw)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name):
    model = peer(name)
    config = ModelConfig.from_hf(model.config.to_dict())
    decoder = Decoder.from_hf(config, model.state_dict())
    for length in (40, 101):  # within the 64 that the model was trained on, and beyond
        tokens = torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            ours = decoder.logits(decoder.hidden(tokens, torch.arange(length), causal))
            theirs = model(tokens[None]).logits[0]
        assert ours.std() > 0.1
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_and_config_survive_a_round_trip(name):
    model = peer(name)
    config = ModelConfig.from_hf(model.config.to_dict())
    decoder = Decoder.from_hf(config, model.state_dict())
    theirs = {k: v for k, v in model.state_dict().items() if k in decoder.to_hf()}
    assert set(decoder.to_hf()) | {"lm_head.weight"} == set(model.state_dict()) | {"lm_head.weight"}
    for key, tensor in decoder.to_hf().items():
        assert torch.equal(tensor, theirs[key]), key
        assert tensor.is_contiguous()
    assert ModelConfig.from_hf(config.to_hf()) == config
    kind = config.to_hf().pop("model_type")
    reopened = AutoConfig.for_model(kind, **{k: v for k, v in config.to_hf().items() if k != "model_type"})
    again = AutoModelForCausalLM.from_config(reopened).float().eval()
    again.load_state_dict(model.state_dict())
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, atol=1e-6, rtol=0)


def test_the_head_follows_the_embedding_when_tied():
    decoder = random_decoder(tiny_config())
    assert decoder.head.weight is decoder.embed.weight
    assert "lm_head.weight" not in decoder.to_hf()


def test_a_sliding_window_bounds_the_sequence():
    raw = SMALL | {"model_type": "mistral", "sliding_window": 16}
    assert ModelConfig.from_hf(raw).max_positions == 16


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
        {"quantization_config": {"bits": 4}},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_a_variant_that_would_be_computed_wrongly_is_refused(change):
    with pytest.raises(ConfigError):
        ModelConfig.from_hf(SMALL | {"model_type": "llama"} | change)


def test_an_unknown_family_is_named_with_the_nearest():
    with pytest.raises(UnknownName, match="'llama'"):
        ModelConfig.from_hf(SMALL | {"model_type": "llamma"})


def test_a_missing_tensor_is_named():
    tensors = random_decoder(tiny_config()).to_hf()
    del tensors["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.up_proj"):
        Decoder.from_hf(tiny_config(), tensors)


def test_rotation_has_the_gradient_of_its_definition():
    from lehr.model.rotary import Rotary, rotate

    cos, sin = Rotary(tiny_config().rope, 8).angles(torch.arange(5), torch.float64)
    heads = torch.randn(5, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (heads,))


def test_building_a_decoder_does_not_load_torchs_compiler() -> None:
    """It takes seconds, in every process."""
    code = "import sys; from lehr.model.tiny import tiny_decoder; tiny_decoder(); print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert "lehr.model.decoder" in done.stdout and "torch._dynamo" not in done.stdout
