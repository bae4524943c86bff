"""Import path of DeepSpeed's operators."""
