gcloud compute tpus tpu-vm create tfdist --zone=us-central2-b --accelerator-type=v4-32 --version=tpu-vm-tf-2.20.0-pod-pjrt --spot --network=mine
gcloud compute tpus tpu-vm scp --recurse . tfdist:. --zone=us-central2-b --worker=all
gcloud compute tpus tpu-vm ssh tfdist --zone=us-central2-b --worker=all '--command=pip install -r req.txt'
gcloud compute tpus tpu-vm ssh tfdist --zone=us-central2-b --worker=0 --ssh-flag=-tt '--command=cd . && env PYTHONUNBUFFERED=1 TFDIST_LAUNCHER=tpu A='"'"'b c'"'"' TPU_NAME=tfdist TPU_LOAD_LIBRARY=0 python3 train.py '"'"'two words'"'"' '"'"'it'"'"'"'"'"'"'"'"'s "$HOME" `x`'"'"' '"'"'new
line'"'"' '"'"''"'"' '"'"'é'"'"''
gcloud compute tpus tpu-vm delete tfdist --zone=us-central2-b --quiet
