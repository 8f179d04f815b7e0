#!/usr/bin/env bash
# What CUB, a ViT-S and a ResNet-50 permit, most telling first; stopped anywhere, the same command goes on.
#   experiments/cub.sh CUB_FOLDER WEIGHTS_FOLDER [RUNS_FOLDER] [RESULTS_FOLDER] [SEEDS] [WHAT]
# WHAT is "vits", "resnet50" or "all". All runs of a table share one process and the compiler's cache.
set -euo pipefail
cub=${1:?where CUB lies}; weights=${2:?where the weights lie}
runs=${3:-runs/reproduce}; results=${4:-experiments/results}; seeds=${5:-1}; what=${6:-all}
reproduce() { python3 -m roadmap reproduce "$@" --seeds "$seeds" --root "cub=$cub" --out "$runs" --results "$results"; }
if [ "$what" != resnet50 ]; then
    reproduce ablation_vits --set hardware.compile=default \
        --set "model.weights=$weights/vit_small_patch14_dinov2_224_fp16.safetensors"
fi
if [ "$what" != vits ]; then
    v1=(--backbone resnet50 --set model=resnet50_v1 --set hardware.compile=reduce-overhead
        --set "model.weights=$weights/resnet50_v1_in1k_fp16.safetensors")
    for table in table5 table3 table6 table10 fig5 table2_cub fig4a fig4b fig4c; do
        reproduce "$table" --dataset cub "${v1[@]}"
    done
    # its own pooling and normalisation, which a plain model=resnet50_v1 would take away
    reproduce table8 --dataset cub --backbone resnet50 --set model.stride_first=true \
        --set hardware.compile=reduce-overhead --set "model.weights=$weights/resnet50_v1_in1k_fp16.safetensors"
fi
