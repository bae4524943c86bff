"""In place of the package that a test of Megatron imports, and does not use."""

mocker = None
