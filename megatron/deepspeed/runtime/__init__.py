"""Import path of DeepSpeed's runtime."""
