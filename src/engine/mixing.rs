//! Where NCCL may be told that captured and uncaptured collectives never share a communicator.
//!
//! `NCCL_GRAPH_MIXING_SUPPORT=0` leaves out of captured graphs what keeps the two apart. That is right
//! only where an engine uses one communicator inside graphs and another outside, which is a property of
//! its source, release by release. Who reads a release adds it here, with what was read.

use super::Engine;

/// What the source of a release shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MixingEvidence {
    /// Which engine.
    pub engine: Engine,
    /// Its release, exactly: what was not read is not known.
    pub version: &'static str,
    /// The communicator that serves captured graphs.
    pub captured: &'static str,
    /// The one that serves everything else.
    pub eager: &'static str,
    /// Without which this does not hold.
    pub only_without: &'static str,
    /// What was read.
    pub source: &'static str,
}

/// Releases that were read, from the packages that servers install.
const READ: &[MixingEvidence] = &[
    MixingEvidence {
        engine: Engine::Sglang,
        version: "0.4.9",
        captured: "pynccl",
        eager: "torch.distributed",
        only_without: "pipeline parallelism",
        source: "sglang 0.4.9, sglang/srt/distributed/parallel_state.py: pynccl is enabled in graph_capture alone",
    },
    MixingEvidence {
        engine: Engine::Sglang,
        version: "0.5.3",
        captured: "pynccl",
        eager: "torch.distributed",
        // There pynccl is enabled outside of graphs, too.
        only_without: "--enable-symm-mem, --enable-dp-attention, --enable-pdmux and pipeline parallelism",
        source: "sglang 0.5.3, sglang/srt/distributed/parallel_state.py: pynccl is enabled in graph_capture, for \
                 symmetric memory, for gathers of unequal parts, and for multiplexed prefill",
    },
];

/// The evidence for a release of an engine; why there is none otherwise.
pub fn mixing_evidence(engine: Engine, version: Option<&str>) -> Result<&'static MixingEvidence, String> {
    match (engine, version) {
        (Engine::Vllm, _) => Err("vLLM serves graphs and everything else by one communicator (vllm/distributed/\
                                  device_communicators/cuda_communicator.py), so they would meet"
            .to_owned()),
        (Engine::Torch | Engine::None, _) => {
            Err("nothing is known of the program that will serve: name one with --engine and --engine-version"
                .to_owned())
        }
        (Engine::Sglang, None) => Err(format!(
            "the release of {} is not known: name it with --engine-version (known: {})",
            engine.title(),
            known(engine)
        )),
        (Engine::Sglang, Some(version)) => READ
            .iter()
            .find(|read| read.engine == engine && read.version == version.trim_start_matches('v'))
            .ok_or_else(|| {
                format!(
                    "nobody has shown for {} {version} that graphs have a communicator of their own (known: {})",
                    engine.title(),
                    known(engine)
                )
            }),
    }
}

fn known(engine: Engine) -> String {
    READ.iter().filter(|read| read.engine == engine).map(|read| read.version).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_releases_that_were_read_have_evidence() {
        assert_eq!(mixing_evidence(Engine::Sglang, Some("0.4.9")).unwrap().captured, "pynccl");
        assert!(mixing_evidence(Engine::Sglang, Some("v0.5.3")).unwrap().only_without.contains("--enable-symm-mem"));
        for version in ["0.5.4", "0.4.90", "", "0.5", "0.5.3.x", "0.5.3.post1"] {
            let why = mixing_evidence(Engine::Sglang, Some(version)).unwrap_err();
            assert!(why.contains("known: 0.4.9, 0.5.3"), "{why}");
        }
        assert!(mixing_evidence(Engine::Sglang, None).unwrap_err().contains("--engine-version"));
        for version in [None, Some("0.11.0")] {
            assert!(mixing_evidence(Engine::Vllm, version).unwrap_err().contains("one communicator"));
        }
        assert!(mixing_evidence(Engine::None, None).is_err() && mixing_evidence(Engine::Torch, Some("2.8")).is_err());
    }

    #[test]
    fn evidence_says_what_was_read_and_which_communicators_differ() {
        for read in READ {
            assert_ne!(read.captured, read.eager);
            assert!(read.source.contains(read.version) && read.source.contains(".py"), "{}", read.source);
        }
    }
}
