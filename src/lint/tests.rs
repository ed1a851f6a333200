//! Cases with the right verdict, one line each, and clean files that must stay without a finding.

use super::*;

const V2_28: NcclVersion = NcclVersion::v2(28, 9);

fn look(text: &str, consumer: Consumer, engine: Option<Engine>) -> Vec<LintFinding> {
    lint("file", text, consumer, Circumstances { version: V2_28, engine })
}

/// (what it shows, who reads, text, line, severity, part of the message or suggestion)
type Case = (&'static str, Consumer, &'static str, usize, LintSeverity, &'static str);

use Consumer::{Compose, DockerEnvFile, EnvFile, Kubernetes, NcclConf, Shell, SystemdUnit};
use LintSeverity::{Error, Warning};

const CASES: &[Case] = &[
    ("misspelt name", EnvFile, "NCCL_MIN_NCHANNEL=8\n", 1, Error, "NCCL_MIN_NCHANNELS"),
    ("lower case name", EnvFile, "A=1\nnccl_proto=LL\n", 2, Error, "NCCL_PROTO"),
    ("quotes in an env file", EnvFile, "NCCL_NTHREADS=\"256\"\n", 1, Error, "without quotes"),
    ("export in an env file", EnvFile, "export NCCL_NTHREADS=256\n", 1, Error, "`export`"),
    ("comment behind a value", EnvFile, "NCCL_NTHREADS=256 # threads\n", 1, Error, "do not read alike"),
    ("a line that is no assignment", EnvFile, "A LINE OF TEXT\nNCCL_DEBUG=WARN\n", 1, Error, "refuses a file"),
    (
        "what a script exports reaches mpirun",
        Shell,
        "export NCCL_P2P_DISABLE=1\nmpirun -x NCCL_P2P_LEVEL=SYS ./server\n",
        2,
        Error,
        "NCCL_P2P_DISABLE=1 wins",
    ),
    ("carriage return", EnvFile, "NCCL_NTHREADS=256\r\n", 1, Error, "carriage return"),
    ("blank before the name", EnvFile, " NCCL_NTHREADS=256\n", 1, Error, "blank"),
    ("size suffix", EnvFile, "NCCL_BUFFSIZE=4M\n", 1, Error, "4194304"),
    ("float", EnvFile, "NCCL_MIN_NCHANNELS=8.0\n", 1, Error, "NCCL reads 8 and drops"),
    ("octal", EnvFile, "NCCL_MIN_NCHANNELS=010\n", 1, Error, "octal"),
    ("word for a number", EnvFile, "NCCL_P2P_DISABLE=true\n", 1, Error, "is no number"),
    ("exponent", EnvFile, "NCCL_BUFFSIZE=1e6\n", 1, Error, "NCCL reads 1 and drops"),
    ("level in lower case", EnvFile, "NCCL_P2P_LEVEL=sys\n", 1, Error, "capitals"),
    ("unknown algorithm", EnvFile, "NCCL_ALGO=rings\n", 1, Error, "fail to start"),
    ("blank in a list", Shell, "export NCCL_ALGO=\"ring, tree\"\n", 1, Error, "fail to start"),
    ("threads off the step", EnvFile, "NCCL_NTHREADS=100\n", 1, Error, "multiple of 32"),
    ("threads too many", EnvFile, "NCCL_NTHREADS=1024\n", 1, Error, "512 at most"),
    ("channels too many", EnvFile, "NCCL_MAX_NCHANNELS=128\n", 1, Error, "at most 64"),
    ("odd buffer", EnvFile, "NCCL_BUFFSIZE=1000\n", 1, Error, "may hang or corrupt"),
    ("removed long ago", EnvFile, "NCCL_TREE_THRESHOLD=0\n", 1, Error, "NCCL_TREE_THRESHOLD"),
    ("not there yet", EnvFile, "NCCL_GRAPH_STREAM_ORDERING=1\n", 1, Warning, "came with"),
    ("thresholds with slashes", EnvFile, "NCCL_THREAD_THRESHOLDS=8/8/64\n", 1, Error, "stops reading"),
    ("contradiction of peer access", EnvFile, "NCCL_P2P_DISABLE=1\nNCCL_P2P_LEVEL=SYS\n", 2, Error, "never reads this"),
    ("no memory left", EnvFile, "NCCL_P2P_DISABLE=1\nNCCL_SHM_DISABLE=1\n", 2, Error, "network"),
    ("minimum above maximum", EnvFile, "NCCL_MAX_NCHANNELS=4\nNCCL_MIN_NCHANNELS=8\n", 2, Error, "more than"),
    (
        "buffer of another protocol",
        EnvFile,
        "NCCL_PROTO=allreduce:LL\nNCCL_BUFFSIZE=1048576\n",
        2,
        Warning,
        "Simple only",
    ),
    ("LL buffer with Simple", EnvFile, "NCCL_PROTO=Simple\nNCCL_LL_BUFFSIZE=1048576\n", 2, Warning, "LL only"),
    ("tree for all", EnvFile, "NCCL_ALGO=Tree\n", 1, Error, "allreduce:Tree"),
    ("LL for all", EnvFile, "NCCL_PROTO=LL\n", 1, Warning, "prefill"),
    ("NVLS with LL", EnvFile, "NCCL_ALGO=allreduce:NVLS\nNCCL_PROTO=allreduce:LL\n", 1, Error, "Simple only"),
    ("LL128 by name", EnvFile, "NCCL_PROTO=LL,LL128,Simple\n", 1, Warning, "corrupted silently"),
    ("graph mixing off", EnvFile, "NCCL_GRAPH_MIXING_SUPPORT=0\n", 1, Warning, "overlap"),
    ("forced peer access", EnvFile, "NCCL_P2P_LEVEL=SYS\n", 1, Warning, "may hang"),
    ("table without plugin", EnvFile, "NCCL_TUNER_CONFIG_FILE=/srv/t.csv\n", 1, Error, "no NCCL_TUNER_PLUGIN"),
    ("set twice", Shell, "export NCCL_NTHREADS=256\nexport NCCL_NTHREADS=512\n", 2, Warning, "last one counts"),
    ("not exported", Shell, "NCCL_NTHREADS=256\npython3 serve.py\n", 1, Warning, "not exported"),
    ("declared, not exported", Shell, "declare -r NCCL_NTHREADS=256\n", 1, Warning, "not exported"),
    ("read-only, not exported", Shell, "readonly NCCL_NTHREADS=256\n", 1, Warning, "not exported"),
    ("declared and exported", Shell, "typeset -rx NCCL_NTHREADS=250\n", 1, Error, "multiple of 32"),
    ("value cut at a blank", Shell, "export NCCL_THREAD_THRESHOLDS=8 8 64\n", 1, Error, "ends at the blank"),
    ("value cut at a comma", Shell, "srun --export=ALL,NCCL_ALGO=Ring,Tree ./s\n", 1, Error, "comma"),
    ("misspelt for mpirun", Shell, "mpirun -np 8 -x NCCL_P2P_LEVLE=PHB ./s\n", 1, Error, "NCCL_P2P_LEVEL"),
    ("unit without Environment", SystemdUnit, "[Service]\nNCCL_NTHREADS=256\n", 2, Error, "no setting"),
    ("unit with a blank", SystemdUnit, "[Service]\nEnvironment=NCCL_THREAD_THRESHOLDS=8 8 64\n", 2, Error, "blank"),
    (
        "compose boolean",
        Compose,
        "services:\n  a:\n    environment:\n      NCCL_P2P_DISABLE: yes\n",
        4,
        Error,
        "boolean",
    ),
    ("compose quotes", Compose, "services:\n  a:\n    environment:\n      - NCCL_ALGO='Ring'\n", 4, Error, "quotes"),
    (
        "kubernetes number",
        Kubernetes,
        "apiVersion: v1\nspec:\n  env:\n  - name: NCCL_NTHREADS\n    value: 256\n",
        5,
        Error,
        "no string",
    ),
    ("quotes for docker alone", DockerEnvFile, "NCCL_NTHREADS=\"256\"\n", 1, Error, "quote"),
    ("export for docker alone", DockerEnvFile, "export NCCL_NTHREADS=256\n", 1, Error, "refuses the whole file"),
    ("nccl.conf blank", NcclConf, "NCCL_NTHREADS = 256\n", 1, Error, "trims nothing"),
];

#[test]
fn each_case_has_its_verdict() {
    assert!(CASES.len() >= 40);
    for (what, consumer, text, line, severity, part) in CASES {
        let findings = look(text, *consumer, None);
        let hit = findings.iter().any(|finding| {
            finding.line == *line
                && finding.severity == *severity
                && (finding.message.contains(part)
                    || finding.suggestion.as_deref().is_some_and(|suggestion| suggestion.contains(part)))
        });
        assert!(hit, "{what}: {findings:#?}");
    }
}

#[test]
fn what_the_engine_sets_itself_is_told() {
    let text = "CUDA_DEVICE_MAX_CONNECTIONS=1\nNCCL_CUMEM_ENABLE=1\n";
    let findings = look(text, EnvFile, Some(Engine::Sglang));
    let told: Vec<(usize, LintSeverity)> = findings.iter().map(|one| (one.line, one.severity)).collect();
    assert_eq!(told, [(1, Error), (2, Warning)], "{findings:#?}");
    assert_eq!(look(text, EnvFile, None), []);
}

/// Files as careful people write them, and the public kind of file each stands for; all in own words and names.
const CLEAN: &[(&str, Consumer, &str)] = &[
    ("an answer of this tool", EnvFile, "# tuned\nNCCL_MIN_NCHANNELS=32\nNCCL_THREAD_THRESHOLDS=-1-1-1+2\n"),
    (
        "docker's documentation of --env-file: comments, quotes kept for a variable that is not NCCL's",
        EnvFile,
        "NCCL_DEBUG=INFO\nNCCL_DEBUG_SUBSYS=INIT,ENV\nNCCL_IB_HCA=mlx5_0:1,mlx5_1:1\nHF_HOME=\"/srv/hf home\"\n",
    ),
    (
        "PyTorch's documentation of torch.distributed: its own variables beside NCCL's",
        EnvFile,
        "NCCL_SOCKET_IFNAME=eth0\nNCCL_IB_DISABLE=1\nGLOO_SOCKET_IFNAME=eth0\nTORCH_NCCL_ASYNC_ERROR_HANDLING=1\n",
    ),
    (
        "NVIDIA's documentation of NCCL_ALGO and NCCL_PROTO: lists for one collective",
        EnvFile,
        "NCCL_ALGO=allreduce:Ring\nNCCL_PROTO=allreduce:LL,Simple\nNCCL_BUFFSIZE=1048576\n",
    ),
    (
        "vLLM's documentation of environment variables, with a tuner plugin",
        EnvFile,
        "VLLM_NCCL_SO_PATH=/srv/lib/libnccl.so.2\nNCCL_TUNER_PLUGIN=/srv/t.so\nNCCL_TUNER_CONFIG_FILE=/srv/t.csv\n",
    ),
    (
        "NVIDIA's CUDA images: what they say of the library they hold",
        EnvFile,
        "NCCL_VERSION=2.28.9-1\nNV_LIBNCCL_PACKAGE_NAME=libnccl2\nNV_LIBNCCL_PACKAGE_VERSION=2.28.9-1\nNCCL_DEBUG=WARN\n",
    ),
    ("DeepSpeed's .deepspeed_env", EnvFile, "NCCL_IB_DISABLE=1\nNCCL_SOCKET_IFNAME=eth0\nNCCL_P2P_DISABLE=1\n"),
    (
        "docker run --env-file: values as they stand",
        DockerEnvFile,
        "# docker\nNCCL_THREAD_THRESHOLDS=8 8 64 2 8 64\nNCCL_DEBUG=WARN\nHF_TOKEN\n",
    ),
    (
        "vLLM's start scripts",
        Shell,
        "#!/bin/bash\nset -euo pipefail\nexport NCCL_P2P_DISABLE=1\n\
         export NCCL_SOCKET_IFNAME=\"$(ip route | awk '{print $5}')\"\n\
         exec python3 -m vllm.entrypoints.openai.api_server --model \"$MODEL\" --tensor-parallel-size 8\n",
    ),
    (
        "SGLang's documentation of starting a server",
        Shell,
        ". /srv/results/tuned.sh && python3 -m sglang.launch_server --model-path /srv/m\n",
    ),
    (
        "the README of nccl-tests: building and mpirun",
        Shell,
        "make MPI=1 NCCL_HOME=/srv/nccl\nexport NCCL_HOME=/srv/nccl\n\
         NCCL_DEBUG=INFO mpirun -np 8 -x NCCL_DEBUG -x LD_LIBRARY_PATH ./build/all_reduce_perf -b 8 -e 128M -f 2\n",
    ),
    (
        "docker's documentation of run",
        Shell,
        "docker run --gpus all --ipc=host -e NCCL_DEBUG=WARN --env-file tuned.env image\n",
    ),
    (
        "a container sees nothing of what the script around it exports",
        Shell,
        "export NCCL_MIN_NCHANNELS=32\ndocker run --gpus all -e NCCL_MAX_NCHANNELS=16 image\n",
    ),
    (
        "a batch script in the style of AWS's for EFA",
        Shell,
        "#!/bin/bash\n#SBATCH --nodes=2\nexport FI_PROVIDER=efa\nexport OFI_NCCL_PROTOCOL=RDMA\nexport NCCL_DEBUG=INFO\n\
         export NCCL_SOCKET_IFNAME=^docker,lo\nsrun --export=ALL,NCCL_NET_PLUGIN=ofi ./train.sh\n",
    ),
    (
        "Slurm's documentation of srun --export",
        Shell,
        "#!/bin/bash\n#SBATCH --gres=gpu:8\nexport NCCL_IB_TIMEOUT=22\nsrun --export=ALL,NCCL_DEBUG=WARN ./serve\n",
    ),
    (
        "torchrun in PyTorch's documentation",
        Shell,
        "NCCL_DEBUG=INFO NCCL_IB_DISABLE=1 torchrun --nproc-per-node=8 train.py\n",
    ),
    (
        "systemd.exec(5): EnvironmentFile and quoted Environment",
        SystemdUnit,
        "[Unit]\nDescription=model\n[Service]\nEnvironmentFile=/etc/model/tuned.env\n\
         Environment=\"NCCL_THREAD_THRESHOLDS=8 8 64 2 8 64\"\nExecStart=/srv/run\n",
    ),
    (
        "systemctl cat of a unit with a drop-in",
        SystemdUnit,
        "# /etc/systemd/system/model.service\n[Service]\nEnvironment=NCCL_DEBUG=INFO\nExecStart=/srv/run\n\n\
         # /etc/systemd/system/model.service.d/override.conf\n[Service]\nEnvironment=\nEnvironment=NCCL_DEBUG=WARN\n",
    ),
    (
        "vLLM's compose file, list form",
        Compose,
        "services:\n  model:\n    image: x\n    env_file: tuned.env\n    environment:\n      - NCCL_DEBUG=WARN\n      \
         - NCCL_CUMEM_ENABLE=${CUMEM:-0}\n",
    ),
    (
        "the compose specification, mapping form with an anchor",
        Compose,
        "x-nccl: &nccl\n  NCCL_DEBUG: WARN\n  NCCL_IB_DISABLE: \"1\"\nservices:\n  a:\n    environment:\n      <<: *nccl\n",
    ),
    (
        "Kubernetes' documentation of env",
        Kubernetes,
        "apiVersion: apps/v1\nkind: Deployment\nspec:\n  template:\n    spec:\n      containers:\n      - name: m\n        env:\n        \
         - name: NCCL_DEBUG\n          value: \"WARN\"\n        - name: NCCL_IB_DISABLE\n          value: \"1\"\n",
    ),
    (
        "Kubernetes' documentation of ConfigMap",
        Kubernetes,
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: nccl\ndata:\n  NCCL_MIN_NCHANNELS: \"32\"\n  NCCL_ALGO: Ring\n",
    ),
    (
        "a manifest in the style of Google's guide to GPUDirect on A3",
        Kubernetes,
        "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - name: m\n    env:\n    - name: NCCL_FASTRAK_CTRL_DEV\n      \
         value: eth0\n    - name: NCCL_CROSS_NIC\n      value: \"0\"\n    - name: NCCL_NET\n      valueFrom:\n        \
         configMapKeyRef: {name: nccl, key: net}\n",
    ),
    ("NVIDIA's documentation of nccl.conf", NcclConf, "# site\nNCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==ens1f0\n"),
];

#[test]
fn clean_files_stay_without_a_finding() {
    assert!(CLEAN.len() >= 20);
    for (what, consumer, text) in CLEAN {
        assert_eq!(look(text, *consumer, None), [], "{what}: {text}");
    }
}

#[test]
fn names_of_others_are_nobodys_slips_and_slips_of_the_keyboard_are() {
    for name in
        ["HOROVOD_NCCL_HOME", "RCCL_DEBUG", "HCCL_ALGO", "OFI_NCCL_PROTOCOL", "NCCLTUNE_ENGINE", "USE_NCCL", "NCL_X"]
    {
        assert_eq!(look(&format!("{name}=1\n"), EnvFile, None), [], "{name}");
    }
    for name in ["NCLL_DEBUG", "NCL_DEBUG", "NCCL_DEBGU", "nccl_debug", "NCCLDEBUG"] {
        let findings = look(&format!("{name}=INFO\n"), EnvFile, None);
        let [finding] = &findings[..] else { panic!("{name}: {findings:?}") };
        assert_eq!((finding.severity, finding.suggestion.as_deref()), (Error, Some("NCCL_DEBUG")), "{name}");
    }
}

/// A megabyte that is made to be slow: many findings in one line, and many processes beside many variables.
#[test]
fn what_a_file_costs_is_bounded() {
    let names: Vec<String> = (0..40_000).map(|number| format!("-e NCCL_{number}=1")).collect();
    let findings = look(&format!("docker run {} image\n", names.join(" ")), Shell, None);
    assert_eq!(findings.len(), MOST_FINDINGS + 1);
    assert!(findings[0].line == 0 && findings[0].message.contains("more findings"), "{:?}", findings[0]);
    let exports: Vec<String> = (0..20_000).map(|number| format!("export A{number}=1;")).collect();
    let commands = "NCCL_DEBUG=INFO x;".repeat(30_000);
    assert_eq!(look(&format!("{}{commands}\n", exports.concat()), Shell, None), []);
}

#[test]
fn a_file_that_is_no_text_of_its_kind_is_one_finding() {
    let findings = look("a: [1\n", Compose, None);
    assert_eq!(findings.len(), 1);
    assert_eq!((findings[0].line, findings[0].severity), (0, Error));
}
