#!/usr/bin/env bash
# All that only a GPU can tell, most telling first, for so many minutes.
#   benchmarks/on_a_gpu.sh CUB_FOLDER WEIGHTS_FOLDER [MINUTES] [PART...]
# Parts, in this order when none is named:
#   tests     pytest -m gpu
#   losses    rank losses beside their floor, graded losses and other measures beside SupAP
#   command   `roadmap train` and `roadmap evaluate` from a cold start, part by part
#   family    every loss on CUB with a ViT-S, 20 epochs, one seed
#   step      a training step by kind of kernel, and the ViT written otherwise
#   stream    a pack larger than the GPU's memory beside one that lies in it
#   tries     what may make a better model of CUB, on held-out classes, for half of what is left
#   paper     experiments/cub.sh: tables of the paper
# A part that fails is told at the end and does not stop the others. Files go where each script writes them
# (benchmarks/results, experiments/results). From the environment: PYTHON.
set -uo pipefail
cub=${1:?where CUB lies}; weights=${2:?where the weights lie}; minutes=${3:-30}
shift $(($# < 3 ? $# : 3))
if [ $# = 0 ]; then set -- tests losses command family step stream tries paper; fi
cub=$(realpath "$cub"); weights=$(realpath "$weights")
cd "$(dirname "$0")/.."
end=$((SECONDS + minutes * 60))
vits=$weights/vit_small_patch14_dinov2_224_fp16.safetensors
failed=()

# run COMMAND...: until it ends or the time is over
run() {
    local left=$((end - SECONDS))
    if [ "$left" -le 0 ]; then failed+=("$*"); return; fi
    echo "== $* ($((left / 60)) minutes left)"
    timeout --signal=TERM --kill-after=30 "$left" "$@" || failed+=("$*")
}

python=${PYTHON:-python3}
for part; do
    case $part in
        tests) run "$python" -m pytest -q -m gpu ;;
        losses)
            run "$python" benchmarks/bench_losses.py --only graded
            run "$python" benchmarks/bench_losses.py --only measures
            run "$python" benchmarks/bench_losses.py
            ;;
        command) run "$python" benchmarks/bench_command.py --root "$cub" --weights "$vits" ;;
        family)
            run "$python" benchmarks/bench_family.py --recipe cub_vits --set "data.root=$cub" \
                --set "model.weights=$vits"
            ;;
        step)
            run "$python" benchmarks/bench_step.py
            run "$python" benchmarks/bench_step.py --models vit_small_patch14_dinov2 --compile blocks --rewrites none \
                patches scales flex stream halves scales,flex,patches scales,flex,patches,halves \
                --out benchmarks/results/step_rewrites_cuda.csv
            ;;
        stream) run "$python" benchmarks/bench_streaming.py --root "$cub" --weights "$vits" ;;
        tries)
            run "$python" benchmarks/bench_tries.py --minutes "$(((end - SECONDS) / 120))" --set "data.root=$cub" \
                --set "model.weights=$vits"
            ;;
        paper) run experiments/cub.sh "$cub" "$weights" "$(((end - SECONDS) / 60))" ;;
        *)
            echo "there is no part $part; there are tests, losses, command, family, step, stream, tries and paper" >&2
            exit 2
            ;;
    esac
done
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed, or out of time: %s\n' "${failed[@]}" >&2
    exit 1
fi
