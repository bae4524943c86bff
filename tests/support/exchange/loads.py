"""Does transformers load what is written here? python tests/support/exchange/loads.py FOLDER [CASE ...]

Run in an environment with transformers (5.x, then 4.57). FOLDER: a folder of folders that `python tests/support/exchange/loads.py write
FOLDER` has made before, in the project's own environment. Prints a line for each case: the largest difference of the scores, in
float64, from the record, and the number of tensors that are missing or unexpected. Exit code 1 if one is above 1e-10, or 0.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

import cases  # noqa: E402

ALL = cases.CASES | cases.T5_CASES | cases.BERT_CASES
# Version 4 divides hidden states wherever the table is tied, gives a window to all layers, and bounds gates at 7.
NOT_OF_4 = ("t5-tied", "qwen2_moe-window", "gpt_oss")


def write(root: Path) -> None:
    from megatron.convert import open_foreign, write_hf_folder

    for name in ALL:
        cases.write_folder(root / "in" / name, cases.read_record(name))
        write_hf_folder(open_foreign(root / "in" / name), root / "out" / name, most_bytes=20_000)


def given(name: str) -> dict:
    import torch

    if name in cases.BERT_CASES:
        said = {key: torch.tensor(x) for key, x in cases.sentences().items()}
        return {"input_ids": said["text"], "attention_mask": said["seen"], "token_type_ids": said["types"]}
    if name not in cases.T5_CASES:
        return {"input_ids": torch.tensor(cases.ids())}
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    return dict(zip(names, map(torch.tensor, cases.texts())))


def check(root: Path, names: list[str]) -> int:
    import torch

    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForPreTraining, AutoModelForSeq2SeqLM

    kinds = dict.fromkeys(cases.T5_CASES, AutoModelForSeq2SeqLM) | dict.fromkeys(
        cases.BERT_CASES, AutoModelForPreTraining
    )
    print(f"transformers {transformers.__version__}")
    wrong = 0
    # its other experts have no float64
    experts = {} if transformers.__version__ < "5" else {"experts_implementation": "eager"}
    for name in names or ALL:
        if name in NOT_OF_4 and transformers.__version__ < "5":
            print(f"{name:20} has no words in this version")
            continue
        try:
            model, told = kinds.get(name, AutoModelForCausalLM).from_pretrained(
                root / "out" / name,
                attn_implementation="eager",
                torch_dtype=torch.float64,
                output_loading_info=True,
                **experts,
            )
            with torch.no_grad():
                said = model.eval()(**given(name))
            scores = said.prediction_logits if name in cases.BERT_CASES else said.logits
            difference = (scores - torch.tensor(cases.read_record(name)["scores"])).abs().max().item()
            names_off = sum(len(told[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
            print(f"{name:20} {difference:.1e} {names_off}")
            wrong += not (difference < 1e-10 and names_off == 0)
        except Exception as error:
            wrong += 1
            print(f"{name:20} {type(error).__name__}: {str(error)[:160]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        sys.exit(check(Path(sys.argv[1]), sys.argv[2:]))
