"""The parts that language models share: embeddings, the stage of a model, the output layer, rules about settings."""
