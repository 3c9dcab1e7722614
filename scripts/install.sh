#!/bin/sh
# Install lora_fp8 on Linux, WSL2 or macOS into a virtual environment of its own:
#
#   sh scripts/install.sh                      # into ./.venv of this checkout
#   sh scripts/install.sh --mirror cn          # the same through mirrors in mainland China
#   sh scripts/install.sh --dir ~/lora-fp8 --package lora_fp8-1.0-py3-none-any.whl
#
# Options:
#   --dir DIR        where .venv and start-ui.sh are made (default: this checkout)
#   --package WHAT   what to install: a wheel, a folder or a name (default: this checkout)
#   --extras LIST    optional parts (default: ui,video,heic,tagger)
#   --torch BACKEND  auto (default), cpu, cu126, cu128, cu130, ...; pypi takes what the package index has
#   --mirror cn      mirrors for Python packages and for Hugging Face
#   --python PYTHON  the Python to use (default: 3.13, 3.12, 3.11 or 3.14)
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
dir=$here package=$here extras=ui,video,heic,tagger torch=auto mirror='' python=''

fail() {
    echo "install.sh: $1" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --dir | --package | --extras | --torch | --mirror | --python)
            [ $# -gt 1 ] || fail "$1 needs a value"
            case $1 in
                --dir) dir=$2 ;;
                --package) package=$2 ;;
                --extras) extras=$2 ;;
                --torch) torch=$2 ;;
                --mirror) mirror=$2 ;;
                --python) python=$2 ;;
            esac
            shift 2 ;;
        *) fail "$1 is not an option; sh scripts/install.sh --help lists them" ;;
    esac
done
case $mirror in
    "" | cn) ;;
    *) fail "--mirror $mirror: there is only cn" ;;
esac
case $(uname -s) in
    Linux | Darwin) ;;
    *) fail "$(uname -s) is neither Linux nor macOS; on Windows use scripts\\install.bat" ;;
esac

# --- Python

# PyTorch 2.13 of constraints.txt has no build for Python 3.15.
suitable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null
}

if [ -n "$python" ]; then
    suitable "$python" || fail "$python is missing, or not Python 3.11 to 3.14"
else
    for name in python3.13 python3.12 python3.11 python3.14 python3; do
        if suitable "$name"; then
            python=$name
            break
        fi
    done
fi
[ -n "$python" ] || fail "Python 3.11 to 3.14 is needed: sudo apt-get install python3 python3-venv (Debian 12, Ubuntu 24.04), brew install python@3.13 (macOS), or name one with --python"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "the venv module of $python is missing: sudo apt-get install python3-venv"

# --- mirrors

if [ "$mirror" = cn ]; then
    export PIP_INDEX_URL="${PIP_INDEX_URL:-https://pypi.tuna.tsinghua.edu.cn/simple}"
    export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-https://pypi.tuna.tsinghua.edu.cn/simple}"
    export HF_ENDPOINT="${HF_ENDPOINT:-https://hf-mirror.com}"
    # PyPI's own build of torch for Linux has CUDA, and the mirror has it; torch's own server is slow from there.
    [ "$torch" != auto ] || torch=pypi
fi

# --- what this machine has

if command -v nvidia-smi >/dev/null 2>&1 && gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null); then
    echo "== GPU: $(echo "$gpus" | tr '\n' ';')"
elif [ "$(uname -s)" = Darwin ]; then
    echo "== macOS: training runs on the CPU; the GPU of a Mac has no FP8 and is not used"
    [ "$torch" != auto ] || torch=pypi
else
    echo "== no NVIDIA GPU seen (nvidia-smi is missing or fails): training runs on the CPU, for miniatures only"
    if grep -qi microsoft /proc/version 2>/dev/null; then
        echo "   WSL2 uses the NVIDIA driver of Windows: install it there, and none in WSL2"
    fi
fi

# --- install

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
bin=$dir/.venv/bin
echo "== $dir/.venv with $("$python" --version); torch: $torch"
[ -x "$bin/python" ] || "$python" -m venv "$dir/.venv"
"$bin/python" -m pip install --quiet --upgrade pip uv
case $package in
    "$here") editable=-e ;;
    *) editable='' ;;
esac
if [ -e "$package" ] && [ -z "$editable" ]; then
    package=$(cd "$(dirname "$package")" && pwd)/$(basename "$package")
fi
set -- pip install --python "$bin/python"
[ ! -f "$here/constraints.txt" ] || set -- "$@" -c "$here/constraints.txt"
[ "$torch" = pypi ] || set -- "$@" --torch-backend "$torch"
"$bin/uv" "$@" $editable "${package}[$extras]"

cat >"$dir/start-ui.sh" <<END
#!/bin/sh
# Open the page of lora_fp8. Its options are those of "lora-fp8 ui".
${HF_ENDPOINT:+export HF_ENDPOINT="\${HF_ENDPOINT:-$HF_ENDPOINT}"}
exec "$bin/lora-fp8" ui "\$@"
END
chmod +x "$dir/start-ui.sh"

"$bin/python" - <<'END'
import torch

gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA GPU usable, the CPU is used"
print(f"== torch {torch.__version__}: {gpu}")
END
cat <<END
== installed. Next:
   "$dir/start-ui.sh"                       the page, at http://127.0.0.1:7860/
   "$bin/lora-fp8" demo                     train the bundled miniature, a few minutes on a CPU
   . "$bin/activate"                        so that "lora-fp8" alone is enough in this shell
${HF_ENDPOINT:+   export HF_ENDPOINT=$HF_ENDPOINT   for base models from the mirror, in each shell}
END
