//! stub
use super::*;
use crate::record::*;
#[allow(missing_docs)]
pub fn pass_shape(_: &ModelConfig, _: &WorkloadRequest) -> Result<PassShape, WorkloadError> {
    let layer = LayerRun {
        count: 61,
        attention_bytes: 7168 * 1024 * 2 * 2,
        cache_bytes_per_token: 0,
        attention_reduces: true,
        feed_forward: Some(FeedForward {
            always_bytes: 7168 * 4096 * 2 * 2,
            expert_bytes: 0,
            experts: 0,
            experts_per_token: 0,
        }),
    };
    Ok(PassShape {
        format: 1,
        model: "bench".into(),
        hidden: 7168,
        layers: vec![layer],
        head_bytes: 0,
        embedding_reduces: false,
        draft: None,
        notes: vec![],
    })
}
#[allow(missing_docs)]
pub fn pass_cases(_: &ModelConfig, r: &WorkloadRequest, context: u64) -> Result<Vec<PassCase>, WorkloadError> {
    let mut v: Vec<PassCase> = r
        .batches
        .iter()
        .map(|(b, w)| PassCase {
            tokens: u64::from(*b) * u64::from(r.verify_tokens),
            batch: *b,
            weight: *w,
            phase: PointPhase::Decode,
            captured: true,
            context,
        })
        .collect();
    v.push(PassCase { tokens: 2048, batch: 1, weight: 0.0, phase: PointPhase::Prefill, captured: false, context: 0 });
    Ok(v)
}
