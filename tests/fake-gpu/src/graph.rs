//! What NCCL's search for rings comes to, and the graph file that takes its place.
//!
//! Nothing is searched: a scenario says whether the search finds a ring. Of a file, what counts is its
//! ring's channels and which GPUs it names; where these are not the communicator's, NCCL stops.

use crate::communicator::Nccl;
use crate::log::Subject;
use crate::scenario::Scenario;

/// The pattern of a ring and of a balanced tree, in NCCL's numbering.
const PATTERNS: [u32; 2] = [4, 1];

/// The rings of a communicator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Graph {
    /// Channels, where a file or a failed search decides about them.
    pub(crate) channels: Option<u32>,
    /// The search found nothing.
    pub(crate) is_fallback: bool,
}

/// Why NCCL stops over a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unusable(pub(crate) String);

/// The values of an attribute, in order of appearance.
fn values<'text>(text: &'text str, name: &str) -> Vec<&'text str> {
    let begins = format!(" {name}=\"");
    text.split(begins.as_str()).skip(1).filter_map(|rest| rest.split_once('"').map(|(value, _)| value)).collect()
}

/// What a file says for a communicator of so many ranks, of which this GPU is one.
fn read(text: &str, ranks: usize, gpu: u32) -> Result<Graph, Unusable> {
    // NCCL writes hexadecimal and reads either.
    let number = |value: &str| match value.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => value.parse().ok(),
    };
    let mut devices: Vec<u32> = values(text, "dev").into_iter().filter_map(number).collect();
    devices.sort_unstable();
    devices.dedup();
    let channels = values(text, "nchannels").first().and_then(|value| value.parse().ok());
    match channels {
        Some(channels) if devices.len() == ranks && devices.contains(&gpu) => {
            // As many again, as NCCL doubles them.
            Ok(Graph { channels: Some(channels), is_fallback: false })
        }
        Some(_) => {
            let strange = devices.iter().find(|device| **device as usize >= ranks).or(devices.first()).unwrap_or(&0);
            Err(Unusable(format!("XML Import Channel : dev {strange} not found.")))
        }
        None => Err(Unusable("XML Parse : Unexpected EOF".to_owned())),
    }
}

/// Rings and trees of a communicator of so many ranks over links of such a kind and bandwidth, and the lines about them.
pub(crate) fn find(
    scenario: &Scenario,
    file: Option<&str>,
    (ranks, gpu): (usize, u32),
    (kind, bandwidth): (&str, f64),
    nccl: &mut Nccl,
) -> Result<Graph, Unusable> {
    let graph = match file {
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .map_err(|error| Unusable(format!("Could not open XML graph file {path} : {error}")))?;
            read(&text, ranks, gpu)?
        }
        None => Graph { channels: scenario.misjudged.then_some(1), is_fallback: scenario.misjudged },
    };
    for pattern in PATTERNS {
        if graph.is_fallback {
            let line = format!("Could not find a path for pattern {pattern}, falling back to simple order");
            nccl.note(Subject::GRAPH, &line);
        }
        let channels = graph.channels.unwrap_or(2);
        let bandwidth = if graph.is_fallback { 0.1 } else { bandwidth };
        nccl.note(
            Subject::GRAPH,
            &format!(
                "Pattern {pattern}, crossNic 0, nChannels {channels}, bw {bandwidth:.6}/{bandwidth:.6}, type {kind}/PIX, \
                 sameChannels 1"
            ),
        );
    }
    Ok(graph)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_counts_for_its_own_gpus_only() {
        let text = "<graphs version=\"1\"><graph id=\"0\" nchannels=\"2\"><channel><gpu dev=\"0\"/><gpu dev=\"0x1\"/>\
                    </channel><channel><gpu dev=\"0\"/><gpu dev=\"1\"/></channel></graph></graphs>";
        assert_eq!(read(text, 2, 1), Ok(Graph { channels: Some(2), is_fallback: false }));
        assert!(read(text, 4, 1).unwrap_err().0.contains("not found"));
        assert!(read(text, 2, 2).is_err());
        assert!(read("", 2, 0).is_err());
    }
}
