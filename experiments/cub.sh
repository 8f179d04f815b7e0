#!/usr/bin/env bash
# What CUB, a ViT-S and a ResNet-50 permit, most telling first, for so many minutes.
#   experiments/cub.sh CUB_FOLDER WEIGHTS_FOLDER [MINUTES] [PART...]
# Parts, in this order when none is named:
#   vits       the ablation, three seeds: SmoothAP, SupAP, ROADMAP, calibration alone, Eq. (7) as printed, a query that
#              is not its own positive, a memory
#   resnet50   ROADMAP and SmoothAP of Table 5, SupAP and the gap of Table 10, one seed, as the paper has them
#   tables     the other rows of the paper for CUB and ResNet-50
#   head       tables and the ablation with a projection after a frozen ResNet-50 in place of the network, five seeds, seconds a run; not
#              among the parts that run when none is named
#   vits_84    the ablation with a ViT-S on pictures of 84 pixels, five seeds, 8 minutes a run on a CPU core; likewise not
# Each run is stored when it ends; one that the time cuts short is saved, and the same command goes on with it. What
# RESULTS holds is not run again, whether its run folder is there or not. A part shares one process and the compiler's
# cache. From the environment: COMPILE (torch.compile's mode), SEEDS of all parts, RUNS, RESULTS, MORE (settings for
# every run) and PYTHON.
set -euo pipefail
cub=${1:?where CUB lies}; weights=${2:?where the weights lie}; minutes=${3:-600}
shift $(($# < 3 ? $# : 3))
if [ $# = 0 ]; then set -- vits resnet50 tables; fi
compile=${COMPILE:-auto}
end=$((SECONDS + minutes * 60))
vits=("model.weights=$weights/vit_small_patch14_dinov2_224_fp16.safetensors")
v1=("model.weights=$weights/resnet50_v1_in1k_fp16.safetensors")

# reproduce SEEDS NAME... [OPTION...]: until the time is over
reproduce() {
    local left=$((end - SECONDS)) seeds=${SEEDS:-$1} code=0 more=()
    shift
    for setting in ${MORE:-}; do more+=(--set "$setting"); done
    if [ "$left" -gt 0 ]; then
        timeout --signal=TERM --kill-after=60 "$left" "${PYTHON:-python3}" -m roadmap reproduce "$@" --missing \
            --seeds "$seeds" --root "cub=$cub" --out "${RUNS:-runs/reproduce}" \
            --results "${RESULTS:-experiments/results}" --set "hardware.compile=$compile" "${more[@]}" || code=$?
    fi
    if [ $((end - SECONDS)) -le 0 ]; then
        echo "$minutes minutes are over; the same command goes on"
        exit 0
    fi
    [ "$code" = 0 ] || exit "$code"
}

for part; do
    case $part in
        vits) reproduce 3 ablation_vits --set "${vits[0]}" ;;
        resnet50)
            reproduce 1 table5 --dataset cub --backbone resnet50 --set model=resnet50_v1 --set "${v1[0]}" \
                --only roadmap --only smoothap
            # SupAP beside that ROADMAP, and the gap of both
            reproduce 1 table10 --dataset cub --backbone resnet50 --set model=resnet50_v1 --set "${v1[0]}"
            ;;
        tables)
            reproduce 1 table5 table3 table6 table10 fig5 table2_cub fig4a fig4b fig4c table1 --dataset cub \
                --backbone resnet50 --set model=resnet50_v1 --set "${v1[0]}"
            # its own pooling and normalisation, which a plain model=resnet50_v1 would take away
            reproduce 1 table8 --dataset cub --backbone resnet50 --set model.stride_first=true --set "${v1[0]}"
            ;;
        head)
            # one seed of everything before the next; in float32, as on a CPU
            for many in $(seq "${SEEDS:-5}"); do
                SEEDS=$many reproduce 5 table5 table6 table3 fig5 table10 fig4a fig4b fig4c fig13a fig13b table8 \
                    table2_cub table1 ablation_head --dataset cub --backbone resnet50_head \
                    --set model.stride_first=true --set "${v1[0]}" --set 'hardware.precision="32"'
            done
            ;;
        vits_84) reproduce 5 ablation_vits_84 --set "${vits[0]}" ;;
        *)
            echo "there is no part $part; there are vits, resnet50, tables, head and vits_84" >&2
            exit 2
            ;;
    esac
done
