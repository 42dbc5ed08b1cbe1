//! Requests that wait for their turn, and who is at fault when a step fails.

use std::collections::VecDeque;

use laser_engine::EngineError;

use super::request::{FAILURES_IN_A_ROW_MAX, Finished, GenerateError, Request};

/// The requests that are not worked on.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    queue: VecDeque<Request>,
    /// Requests whose step failed: each runs alone, so that the one at fault is found.
    suspects: VecDeque<Request>,
    /// The batch is one suspect.
    quarantine: bool,
    failures_in_a_row: usize,
}

impl Waiting {
    pub(crate) fn len(&self) -> usize {
        self.queue.len() + self.suspects.len()
    }

    pub(crate) fn submit(&mut self, request: Request) {
        self.queue.push_back(request);
    }

    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.suspects.clear();
        self.failures_in_a_row = 0;
    }

    /// How many requests may be worked on at once, of at most `batch`. A suspect joins only an empty batch, and nobody
    /// joins it.
    pub(crate) fn room(&mut self, batch: usize, is_idle: bool) -> usize {
        if is_idle {
            self.quarantine = !self.suspects.is_empty();
        }
        if self.quarantine { 1 } else { batch }
    }

    /// The request whose turn it is.
    pub(crate) fn next(&mut self) -> Option<Request> {
        self.turn().pop_front()
    }

    /// Gives back the request whose turn it was.
    pub(crate) fn put_back(&mut self, request: Request) {
        self.turn().push_front(request);
    }

    fn turn(&mut self) -> &mut VecDeque<Request> {
        if self.quarantine { &mut self.suspects } else { &mut self.queue }
    }

    /// A request has its result.
    pub(crate) fn succeeded(&mut self) {
        self.failures_in_a_row = 0;
    }

    /// The engine failed for a request that had it to itself.
    pub(crate) fn fail(
        &mut self,
        request: &Request,
        error: EngineError,
        finished: &mut Vec<Finished>,
    ) -> Result<(), GenerateError> {
        finished.push(Finished { id: request.id, result: Err((&error).into()) });
        self.failures_in_a_row += 1;
        match self.failures_in_a_row {
            FAILURES_IN_A_ROW_MAX.. => Err(GenerateError::Engine(error)),
            _ => Ok(()),
        }
    }

    /// After a failed step the requests of the batch start over, each alone; one that then fails is at fault.
    pub(crate) fn isolate(
        &mut self,
        requests: Vec<Request>,
        error: EngineError,
        finished: &mut Vec<Finished>,
    ) -> Result<(), GenerateError> {
        match requests.as_slice() {
            [suspect] if self.quarantine => self.fail(suspect, error, finished),
            _ => {
                self.suspects.extend(requests);
                Ok(())
            }
        }
    }
}
