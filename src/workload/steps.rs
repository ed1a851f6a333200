//! From a pass's shape to the steps a worker carries out.

use crate::record::{PassCase, PassShape, PassStep, PointPhase};

/// Matrix widths are rounded up to this, as weights in memory are.
const WIDTH: u64 = 16;
/// No GPU holds as much: a shape that asks for more was edited by hand, and is refused where memory is asked for.
const MOST_BYTES: u64 = 1 << 50;

/// The steps of one pass, in order: draft passes where the target verifies, the embedding's
/// all-reduce, per layer attention (weights, then cache) and feed-forward with their all-reduces, and
/// the output head. Weight matrices appear as bfloat16 columns of equal bytes.
///
/// The logits' all-gather is left out: workers measure all-reduces.
pub fn pass_steps(shape: &PassShape, case: &PassCase) -> Vec<PassStep> {
    let hidden = shape.hidden;
    let mut steps = Vec::new();
    let product = |steps: &mut Vec<PassStep>, rows: u64, bytes: u64| {
        let bytes = bytes.min(MOST_BYTES);
        if bytes > 0 {
            let columns = bytes.div_ceil(2 * hidden).next_multiple_of(WIDTH);
            steps.push(PassStep::Product { rows: rows.max(1), inputs: hidden, columns });
        }
    };
    let reduce = PassStep::Reduce { elements: case.tokens * hidden };
    if let (Some(draft), PointPhase::Verify) = (&shape.draft, case.phase) {
        let width = draft.hidden.unwrap_or(hidden);
        let short = std::iter::repeat_n(draft.tokens_per_sequence.unwrap_or(1), draft.passes as usize);
        for tokens_per_sequence in draft.long_tokens_per_sequence.into_iter().chain(short) {
            let tokens = u64::from(case.batch) * u64::from(tokens_per_sequence);
            if draft.bytes > 0 {
                let columns = draft.bytes.div_ceil(2 * width).next_multiple_of(WIDTH);
                steps.push(PassStep::Product { rows: tokens.max(1), inputs: width, columns });
            }
            for _ in 0..draft.reduces {
                steps.push(PassStep::Reduce { elements: tokens * width });
            }
        }
    }
    if shape.embedding_reduces {
        steps.push(reduce);
    }
    for run in &shape.layers {
        for _ in 0..run.count {
            product(&mut steps, case.tokens, run.attention_bytes);
            // Reading the cache is memory traffic and little arithmetic, whatever the rows.
            let tokens = u64::from(case.batch).saturating_mul(case.context);
            let cache = tokens.saturating_mul(run.cache_bytes_per_token);
            product(&mut steps, case.tokens.min(16), cache);
            if run.attention_reduces {
                steps.push(reduce);
            }
            if let Some(block) = &run.feed_forward {
                product(&mut steps, case.tokens, block.always_bytes);
                let routed = block.bytes(case.tokens) - block.always_bytes;
                if let Some(distinct) = routed.checked_div(block.expert_bytes).filter(|distinct| *distinct > 0) {
                    // Each distinct expert sees its share of the tokens.
                    let rows = (case.tokens * u64::from(block.experts_per_token)).div_ceil(distinct);
                    product(&mut steps, rows, routed);
                }
                steps.push(reduce);
            }
        }
    }
    // Prefill keeps the last row of each sequence.
    let rows = if case.phase == PointPhase::Prefill { u64::from(case.batch) } else { case.tokens };
    product(&mut steps, rows, shape.head_bytes);
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{DraftShape, FeedForward, LayerRun};

    fn shape() -> PassShape {
        PassShape {
            format: 1,
            model: "m".to_owned(),
            hidden: 1024,
            layers: vec![
                LayerRun {
                    count: 1,
                    attention_bytes: 1024 * 2 * 512,
                    cache_bytes_per_token: 1024,
                    attention_reduces: true,
                    feed_forward: Some(FeedForward {
                        always_bytes: 1024 * 2 * 2048,
                        expert_bytes: 0,
                        experts: 0,
                        experts_per_token: 0,
                    }),
                },
                LayerRun {
                    count: 2,
                    attention_bytes: 1024 * 2 * 512,
                    cache_bytes_per_token: 1024,
                    attention_reduces: true,
                    feed_forward: Some(FeedForward {
                        always_bytes: 1024 * 2 * 32,
                        expert_bytes: 1024 * 2 * 64,
                        experts: 64,
                        experts_per_token: 4,
                    }),
                },
            ],
            head_bytes: 1024 * 2 * 320,
            embedding_reduces: true,
            draft: Some(DraftShape { passes: 2, bytes: 1024 * 2 * 160, reduces: 3, ..DraftShape::default() }),
            notes: Vec::new(),
        }
    }

    fn case(tokens: u64, phase: PointPhase) -> PassCase {
        PassCase { tokens, batch: 1, weight: 1.0, phase, captured: true, context: 0 }
    }

    fn reduces(steps: &[PassStep]) -> usize {
        steps.iter().filter(|step| matches!(step, PassStep::Reduce { .. })).count()
    }

    fn weight_bytes(steps: &[PassStep]) -> u64 {
        steps
            .iter()
            .map(|step| match step {
                PassStep::Product { inputs, columns, .. } => inputs * columns * 2,
                PassStep::Reduce { .. } => 0,
            })
            .sum()
    }

    #[test]
    fn a_pass_has_the_collectives_of_its_model_and_the_bytes_of_its_weights() {
        let shape = shape();
        let decode = pass_steps(&shape, &case(1, PointPhase::Decode));
        assert_eq!(reduces(&decode), 1 + 2 * 3);
        let expected = 3 * 512 + 2048 + 2 * (32 + 4 * 64) + 320;
        assert_eq!(weight_bytes(&decode), expected * 1024 * 2);
        let verify = pass_steps(&shape, &case(4, PointPhase::Verify));
        assert_eq!(reduces(&verify), 2 * 3 + 1 + 2 * 3, "two draft passes come first");
        assert_eq!(verify[0], PassStep::Product { rows: 1, inputs: 1024, columns: 160 });
    }

    #[test]
    fn a_draft_of_its_own_width_reads_what_was_accepted_in_one_longer_pass() {
        let draft = DraftShape {
            passes: 2,
            bytes: 512 * 2 * 32,
            reduces: 3,
            hidden: Some(512),
            tokens_per_sequence: Some(2),
            long_tokens_per_sequence: Some(4),
        };
        let steps = pass_steps(
            &PassShape { draft: Some(draft), ..shape() },
            &PassCase { batch: 8, ..case(32, PointPhase::Verify) },
        );
        assert_eq!(reduces(&steps), 3 * 3 + 1 + 2 * 3);
        assert_eq!(steps[0], PassStep::Product { rows: 32, inputs: 512, columns: 32 });
        assert_eq!(steps[1], PassStep::Reduce { elements: 32 * 512 });
        assert_eq!(steps[4], PassStep::Product { rows: 16, inputs: 512, columns: 32 });
        assert_eq!(steps[5], PassStep::Reduce { elements: 16 * 512 });
    }

    #[test]
    fn prefill_reads_every_expert_and_each_sees_its_share_of_the_tokens() {
        let steps = pass_steps(&shape(), &case(2048, PointPhase::Prefill));
        let routed = steps.iter().find_map(|step| match step {
            PassStep::Product { rows, columns, .. } if *columns == 64 * 64 => Some(*rows),
            _ => None,
        });
        assert_eq!(routed, Some(2048 * 4 / 64));
        let head = steps.last();
        assert_eq!(head, Some(&PassStep::Product { rows: 1, inputs: 1024, columns: 320 }));
    }

    #[test]
    fn context_adds_traffic() {
        let with = PassCase { context: 4096, ..case(1, PointPhase::Decode) };
        let more = weight_bytes(&pass_steps(&shape(), &with))
            - weight_bytes(&pass_steps(&shape(), &case(1, PointPhase::Decode)));
        assert_eq!(more, 3 * 4096 * 1024);
    }

    #[test]
    fn a_shape_that_was_edited_never_overflows() {
        let mut shape = shape();
        shape.layers[0].cache_bytes_per_token = u64::MAX;
        shape.head_bytes = u64::MAX;
        let steps = pass_steps(&shape, &PassCase { context: u64::MAX, ..case(4, PointPhase::Decode) });
        assert!(weight_bytes(&steps) > 1 << 50);
    }
}
