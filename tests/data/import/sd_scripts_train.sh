#!/bin/sh
# as in the documentation of sdxl_train_network.py
cd /opt/sd-scripts
accelerate launch --num_cpu_threads_per_process 1 --num_processes 2 sdxl_train_network.py \
  --pretrained_model_name_or_path="stabilityai/stable-diffusion-xl-base-1.0" \
  --train_data_dir="pictures" \
  --output_dir=output --output_name="my lora/v2" \
  --network_module=networks.lora --network_dim=32 --network_alpha=16 \
  --network_args "conv_dim=8" "conv_alpha=1" \
  --learning_rate=1e-4 --optimizer_type Prodigy --optimizer_args decouple=True weight_decay=0.01 \
  --lr_scheduler=cosine_with_restarts --lr_scheduler_num_cycles=3 \
  --resolution=1024,1024 --enable_bucket --bucket_no_upscale \
  --max_train_epochs=4 --train_batch_size=1 --mixed_precision=fp16 --full_fp16 \
  --xformers --cache_latents --shuffle_caption --keep_tokens=1 --caption_extension=.txt \
  --min_snr_gamma=5 --save_every_n_epochs=1 --seed=1234567890123 --no_half_vae \
  --huggingface_token=hf_CANARYcanaryCANARYcanaryCANARYcanary
