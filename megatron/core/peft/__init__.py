"""Parameter-efficient fine-tuning: low-rank adapters on the linears of a model that stays as it is.

lora_config      the flags
lora             the adapters, in any layout
lora_of_experts  those of experts' stacked linears
adapters         what both share
"""
