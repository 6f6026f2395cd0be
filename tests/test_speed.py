"""Operations of a training step, and the machine's ceiling."""

import keras
import pytest

import keras_tinygpt as tg
from keras_tinygpt import speed


def test_operations_of_the_mini_shapes():
    gpt = tg.build_gpt(tg.GPTConfig.preset("mini", vocab_size=65))
    # 4 blocks of 12 x 128^2, the head, and 4 x 12 x 128 x 128 for attention.
    expected = 6 * (4 * 12 * 128**2 + 128 * 65) + 4 * 12 * 128 * 128
    assert speed.flops_per_token(gpt) == expected == 5_554_944
    assert speed.flops_per_token(gpt, 64) == expected - 4 * 12 * 128 * 64
    lstm = tg.build_lstm(tg.LSTMConfig.preset("mini", vocab_size=65))
    expected = 6 * (64 * 1024 + 256 * 1024 + 256 * 65)
    assert speed.flops_per_token(lstm) == expected


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_counted(tied):
    config = tg.GPTConfig(11, 8, 1, 2, hidden_dim=12, tie_embeddings=tied)
    matrices = 12 * 12**2 + 12 * 11
    assert speed.flops_per_token(tg.build_gpt(config)) == 6 * matrices + 12 * 8 * 12


@pytest.mark.backend
def test_ceiling_and_line(monkeypatch):
    monkeypatch.setattr(speed, "CEILING_SIZE", 64)
    assert 1e6 < speed.matmul_ceiling("bfloat16") < 1e16
    monkeypatch.setattr(speed, "matmul_ceiling", lambda dtype: 4e9)
    config = tg.GPTConfig(11, 8, 1, 2, hidden_dim=12)
    model = tg.build_gpt(config, dtype=keras.DTypePolicy("mixed_bfloat16"))
    flops = speed.flops_per_token(model)
    assert speed.speed_line(model, 1e9 / flops) == (
        f"{1e9 / flops:,.0f} tokens/s at {flops / 1e6:.2f} MFLOP a token: "
        "1.0 GFLOP/s, 25% of the 4 GFLOP/s of a bfloat16 matrix product here"
    )
