"""A schedule whose stages lie on the ranks in a V, two on each: the first stage and the last, which share a table, are on rank 0."""

from schedule import v_shaped

from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import SCHEDULES
from megatron.training import pretrain
from pretrain_gpt import forward_step, model_provider, train_valid_test_datasets_provider

SCHEDULES["v"] = v_shaped

if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
