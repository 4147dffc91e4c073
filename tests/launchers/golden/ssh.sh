# chief:0
TFDIST_SEND_TF_CONFIG='{"cluster": {"chief": ["10.0.0.2:2223"], "worker": ["alpha:2222", "alpha:2223"], "ps": ["10.0.0.2:2222"]}, "task": {"type": "chief", "index": 0}}' TFDIST_SEND_TFDIST_LAUNCHER=ssh TFDIST_SEND_PYTHONUNBUFFERED=1 TFDIST_SEND_A='b
c' TFDIST_SEND_CUDA_VISIBLE_DEVICES='' python3 -P -m tfdist.launchers.ssh.client me@beta python3 '/data/my project' '' -p2200 -- train.py 'two words'

# worker:0
TFDIST_SEND_TF_CONFIG='{"cluster": {"chief": ["10.0.0.2:2223"], "worker": ["alpha:2222", "alpha:2223"], "ps": ["10.0.0.2:2222"]}, "task": {"type": "worker", "index": 0}}' TFDIST_SEND_TFDIST_LAUNCHER=ssh TFDIST_SEND_PYTHONUNBUFFERED=1 TFDIST_SEND_A='b
c' TFDIST_SEND_CUDA_VISIBLE_DEVICES=0 python3 -P -m tfdist.launchers.ssh.client alpha python3 '/data/my project' '' -p2200 -- train.py 'two words'

# worker:1
TFDIST_SEND_TF_CONFIG='{"cluster": {"chief": ["10.0.0.2:2223"], "worker": ["alpha:2222", "alpha:2223"], "ps": ["10.0.0.2:2222"]}, "task": {"type": "worker", "index": 1}}' TFDIST_SEND_TFDIST_LAUNCHER=ssh TFDIST_SEND_PYTHONUNBUFFERED=1 TFDIST_SEND_A='b
c' TFDIST_SEND_CUDA_VISIBLE_DEVICES=1 python3 -P -m tfdist.launchers.ssh.client alpha python3 '/data/my project' '' -p2200 -- train.py 'two words'

# ps:0
TFDIST_SEND_TF_CONFIG='{"cluster": {"chief": ["10.0.0.2:2223"], "worker": ["alpha:2222", "alpha:2223"], "ps": ["10.0.0.2:2222"]}, "task": {"type": "ps", "index": 0}}' TFDIST_SEND_TFDIST_LAUNCHER=ssh TFDIST_SEND_PYTHONUNBUFFERED=1 TFDIST_SEND_A='b
c' TFDIST_SEND_CUDA_VISIBLE_DEVICES='' python3 -P -m tfdist.launchers.ssh.client me@beta python3 '/data/my project' '' -p2200 -- train.py 'two words'
