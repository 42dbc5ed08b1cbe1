//! Plain decoding by mistralrs, for architectures that the tree engine does not own.
//!
//! A step is a whole batch of texts: mistralrs schedules them itself. Nothing is drafted, so every token is a
//! forward of its own, and log probabilities are not known (0).

use std::collections::VecDeque;
use std::time::Instant;

use laser_schema::model::{ModelError, Tokenizer};
use tokio::runtime::Handle;

use crate::engine::{EngineError, Finish, MistralEngine};
use crate::generate::{
    FAILURES_IN_A_ROW_MAX, Finished, GenerateError, GenerateOptions, Generated, Request,
    StopReason, TextGenerator, cut_at_stop,
};

/// Generates texts with mistralrs itself. Lives on a thread that may block.
#[derive(Debug)]
pub struct PlainGenerator {
    engine: MistralEngine,
    runtime: Handle,
    tokenizer: Tokenizer,
    options: GenerateOptions,
    queue: VecDeque<Request>,
    failures_in_a_row: usize,
}

impl PlainGenerator {
    /// A generator without requests, to be driven from outside of `runtime`'s own threads.
    pub fn new(
        engine: MistralEngine,
        runtime: Handle,
        tokenizer: Tokenizer,
        options: GenerateOptions,
    ) -> Self {
        Self {
            engine,
            runtime,
            tokenizer,
            options,
            queue: VecDeque::new(),
            failures_in_a_row: 0,
        }
    }

    fn generated(&self, mut tokens: Vec<u32>, finish: Finish) -> Result<Generated, ModelError> {
        let (mut stop, mut text) = (StopReason::Length, None);
        for length in 1..=tokens.len() {
            text = cut_at_stop(&tokens[..length], &self.options.stop, &self.tokenizer)?;
            if text.is_some() {
                tokens.truncate(length);
                stop = StopReason::Stop;
                break;
            }
        }
        let text = text.map_or_else(|| self.tokenizer.decode(&tokens), Ok)?;
        if finish == Finish::Stop && stop == StopReason::Length {
            stop = StopReason::End;
            tokens.extend(self.options.end_of_text.first());
        }
        let step_accepted = vec![0; tokens.len()];
        Ok(Generated {
            text,
            tokens,
            stop,
            step_accepted,
            ..Generated::default()
        })
    }
}

impl TextGenerator for PlainGenerator {
    fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    fn batch(&self) -> usize {
        self.options.batch
    }

    fn load(&self) -> usize {
        self.queue.len()
    }

    fn submit(&mut self, request: Request) {
        self.queue.push_back(request);
    }

    fn share_prefix(&mut self, _prompts: &[&[u32]]) -> Result<(), EngineError> {
        Ok(())
    }

    fn step(&mut self) -> Result<Vec<Finished>, GenerateError> {
        let count = self.queue.len().min(self.options.batch);
        let requests: Vec<Request> = self.queue.drain(..count).collect();
        let prompts = requests.iter().map(|r| r.prompt.clone()).collect();
        let start = Instant::now();
        let (max, stop) = (self.options.max_new_tokens, &self.options.end_of_text);
        let texts = self
            .runtime
            .block_on(self.engine.generate(prompts, max, stop));
        let share = start.elapsed().as_secs_f64() / count.max(1) as f64;
        let mut finished = Vec::with_capacity(count);
        for (request, text) in requests.iter().zip(texts) {
            let result = match text {
                Ok(text) => {
                    self.failures_in_a_row = 0;
                    let text = self.generated(text.tokens, text.finish);
                    text.map(|t| Generated {
                        engine_seconds: share,
                        ..t
                    })
                    .map_err(|e| e.to_string())
                }
                Err(error) => {
                    let reason = error.to_string();
                    let engine = matches!(error, EngineError::Mistralrs { .. });
                    self.failures_in_a_row += usize::from(engine);
                    if self.failures_in_a_row >= FAILURES_IN_A_ROW_MAX {
                        return Err(GenerateError::Engine(error));
                    }
                    Err(reason)
                }
            };
            finished.push(Finished {
                id: request.id,
                result,
            });
        }
        Ok(finished)
    }

    fn reset(&mut self) {
        self.queue.clear();
        self.failures_in_a_row = 0;
    }
}
