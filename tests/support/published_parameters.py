"""Published models, and how many parameters they have."""

# Counted by transformers on the meta device.
PARAMETERS = {
    **{"gpt2": 124_439_808, "pythia-70m": 70_426_624, "Llama-2-7b": 6_738_415_616, "Llama-3.1-8B": 8_030_261_248},
    **{"Llama-3.2-1B": 1_235_814_400, "Mistral-7B-v0.1": 7_241_732_096, "Qwen2.5-0.5B": 494_032_768},
    **{"Qwen3-0.6B": 596_049_920, "gemma-2b": 2_506_172_416, "gemma-2-2b": 2_614_341_888, "gemma-3-1b": 999_885_952},
    **{"phi-2": 2_779_683_840, "Phi-3-mini-4k": 3_821_079_552, "OLMo-2-7B": 7_298_617_344},
    **{"Olmo-3-7B": 7_298_011_136, "SmolLM3-3B": 3_075_098_624, "starcoder2-3b": 3_030_371_328},
    **{"granite-3.0-2b": 2_533_531_648, "command-r-35b": 34_980_831_232, "bert-base": 110_106_428},
    **{"Mixtral-8x7B-v0.1": 46_702_792_704, "Qwen1.5-MoE-A2.7B": 14_315_784_192, "Qwen3-30B-A3B": 30_532_122_624},
    **{"OLMoE-1B-7B-0924": 6_919_161_856, "gpt-oss-20b": 20_914_757_184, "t5-small": 60_506_624},
    **{"FlexOlmo-7x7B-1T": 33_270_665_216, "granite-3.0-1b-a400m": 1_334_628_352},
}
